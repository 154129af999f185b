"""A device, a model, a learner and checkpoints that cost virtual time and no arithmetic.

They stand where the real ones do, so that a whole run (your environments, agents and rewards under the real actors)
is played in a test: a day of tool latency in a second, and the same again for the same seed. Run it under
`trio.testing.MockClock(autojump_threshold=0)`, with async environments or `environment.isolation = "inline"`: a mock
clock leaps past what happens in threads.

    learner, checkpoints = SimulatedLearner(), MemoryCheckpoints()
    StandardRun(
        config, cast, learner, learner.publish, partial(learner.rewind, checkpoints), SimulatedEngine, recorder,
        checkpoints, Ledger(folder), learner.weights(), NOTHING, make_accelerator=SimulatedAccelerator,
    )
"""

import copy
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import trio

from trouper.actors.accelerator import name_of
from trouper.actors.trainer import CheckpointMeta
from trouper.channels import FinishReason, Group, Turn, Weights
from trouper.learner.engine import Finished, Request
from trouper.learner.request import check

T = TypeVar("T")


def default_seconds(call: str) -> float:
    """What device calls cost unless you say otherwise: a decode chunk 0.1 s, an optimizer step 1 s, a swap 0.05 s."""
    return {"decode": 0.1, "add": 0.2, "update": 1.0, "swap": 0.05, "publish": 0.05}.get(call, 0.0)


class SimulatedAccelerator:
    """Spends virtual time where a device would compute, then calls on the event loop.

    Args:
        name: as that of a `DeviceThread`.
        seconds: how long the call of a function or method of this name takes.
    """

    def __init__(self, name: str, seconds: Callable[[str], float] = default_seconds) -> None:
        self.name = name
        self.busy_seconds = 0.0
        self.running: tuple[str, float] | None = None
        self._seconds = seconds
        self._one_at_a_time = trio.Lock()

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        """Run `call(*args)`; like a device's, the call cannot be interrupted once it has begun."""
        async with self._one_at_a_time:
            seconds = self._seconds(getattr(call, "__name__", type(call).__name__))
            self.running = (name_of(call), trio.current_time())
            with trio.CancelScope(shield=True):
                await trio.sleep(seconds)
            self.running = None
            self.busy_seconds += seconds
            return call(*args)


class SimulatedEngine:
    """A generation engine whose token at a position is a pure function of the request's seed.

    Args:
        weights: the first weights; `params` may be anything that `checksum_of` takes.
        vocabulary: ids are drawn evenly from `[0, vocabulary)`.
        slots: requests decoded side by side; the others wait.
        length: tokens that a conversation may have.
        chunk: tokens per decode call.
    """

    def __init__(
        self, weights: Weights, *, vocabulary: int = 16, slots: int = 8, length: int = 1024, chunk: int = 4
    ) -> None:
        self.version = weights.version
        self._params = weights.params
        self._vocabulary = vocabulary
        self._slots = slots
        self._length = length
        self._chunk = chunk
        self._requests: dict[int, Request] = {}
        # By request that has a slot: each token, the step of the weights that sampled it, and that of the oldest keys
        # it attended to.
        self._sampled: dict[int, list[tuple[int, int, int]]] = {}
        self._oldest: dict[object, int] = {}  # by conversation: the step under which its first keys were made

    @property
    def live(self) -> int:
        """Requests that run or wait."""
        return len(self._requests)

    def check(self, request: Request) -> None:
        """Refuse what the real engine refuses."""
        check(request, length=self._length, vocabulary=self._vocabulary)

    def submit(self, request: Request) -> None:
        """Queue a request."""
        if request.id in self._requests:
            raise ValueError(f"request {request.id} runs or waits already; every request needs an id of its own")
        self._requests[request.id] = request

    @property
    def needs_prefill(self) -> bool:
        """Whether a request can have a slot."""
        return len(self._sampled) < min(self._slots, len(self._requests))

    @property
    def can_decode(self) -> bool:
        """Whether a request has a slot."""
        return bool(self._sampled)

    def prefill(self) -> None:
        """Give slots to the oldest requests."""
        for id in list(self._requests)[: self._slots]:
            self._sampled.setdefault(id, [])

    def decode(self) -> list[Finished]:
        """One chunk for every request that has a slot."""
        finished = []
        for request in [self._requests[id] for id in self._sampled]:
            oldest = self._oldest.setdefault(request.conversation, self.version[1])
            sampled = self._sampled[request.id]
            reason: FinishReason | None = None
            for _ in range(self._chunk):
                token = self.token(request.seed, len(request.tokens) + len(sampled))
                sampled.append((token, self.version[1], oldest))
                if token in request.stop or len(sampled) == request.max_tokens:
                    reason = "stop" if token in request.stop else "length"
                    break
            if reason is not None:
                finished.append(Finished(request.id, self._turn(request, reason)))
                self.cancel(request.id)
        return finished

    def token(self, seed: int, position: int) -> int:
        """The id sampled at a position of the context; override it to play another model."""
        digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little") % self._vocabulary

    def _turn(self, request: Request, finish: FinishReason) -> Turn:
        tokens, versions, attended = zip(*self._sampled[request.id], strict=True)
        return Turn(
            tokens=np.array(tokens, np.int32),
            logprobs=np.full(len(tokens), -math.log(self._vocabulary), np.float32),
            versions=np.array(versions, np.int32),
            finish=finish,
            kv_version=attended[0],
        )

    def swap(self, params: Any, version: tuple[int, int], kv: Literal["keep", "recompute"]) -> None:
        """Stamp what is sampled from now on with this version."""
        if version < self.version:
            raise ValueError(f"weights {version} lie before {self.version}; (life, step) must grow")
        if kv == "recompute" or version == self.version or version[0] != self.version[0]:
            self._oldest.clear()
        self._params, self.version = params, version

    def abort(self, id: int) -> Turn | None:
        """End a request with what was sampled of it so far."""
        turn = self._turn(self._requests[id], "length") if self._sampled.get(id) else None
        self.cancel(id)
        return turn

    def cancel(self, id: int) -> None:
        """Forget a request."""
        self._requests.pop(id, None)
        self._sampled.pop(id, None)

    def release(self, conversation: int) -> None:
        """Forget a conversation, and its request if one runs."""
        self._oldest.pop(conversation, None)
        for request in [each for each in self._requests.values() if each.conversation == conversation]:
            self.cancel(request.id)

    def warm_up(self) -> None:
        """Nothing to compile."""

    def checksum(self) -> int:
        """Of the parameters it was given."""
        return checksum_of(self._params)


def checksum_of(params: Any) -> int:
    """64 bits of the parameters' `repr`."""
    return int.from_bytes(hashlib.blake2b(repr(params).encode(), digest_size=8).digest(), "little")


class SimulatedLearner:
    """A learner whose parameters are the number of updates it has taken.

    Attributes:
        step: updates taken.
        trained: each group with the number of the update that it went into, from 0.
    """

    def __init__(self) -> None:
        self.step = 0
        self.trained: list[tuple[int, Group]] = []
        self._added: list[Group] = []

    def add(self, groups: Sequence[Group]) -> None:
        """Take groups of the coming update."""
        self._added += groups

    def update(self) -> dict[str, float]:
        """Count an update."""
        self.trained += [(self.step, group) for group in self._added]
        self._added.clear()
        self.step += 1
        return {"loss": 0.0}

    def warm_up(self) -> None:
        """Nothing to compile."""

    def publish(self) -> tuple[Any, int]:
        """The parameters and their checksum."""
        return self.step, checksum_of(self.step)

    def weights(self, *, life: int = 1, step: int = 0) -> Weights:
        """The parameters as a run's first weights.

        Args:
            life: of the run.
            step: steps of the training order that are done; more than `self.step` where some had nothing to train.
        """
        params, checksum = self.publish()
        return Weights(life=life, step=step, params=params, checksum=checksum)

    def state_tree(self) -> dict[str, int]:
        """What a checkpoint holds."""
        return {"step": self.step}

    def rewind(self, checkpoints: "MemoryCheckpoints") -> CheckpointMeta | None:
        """Go back to the newest checkpoint and return its record; to the beginning, and None, where there is none."""
        self._added.clear()
        newest = checkpoints.latest()
        tree, meta = ({"step": 0}, None) if newest is None else checkpoints.restore(newest)
        self.step = tree["step"]
        return None if meta is None else msgspec.convert(meta, CheckpointMeta)


class MemoryCheckpoints:
    """Checkpoints that live as long as the object.

    Attributes:
        saved: (tree, meta) by step.
    """

    def __init__(self) -> None:
        self.saved: dict[int, tuple[Any, dict[str, Any]]] = {}

    def save(self, step: int, tree: Any, meta: dict[str, Any], score: float | None) -> None:
        """Keep a copy."""
        self.saved[step] = (copy.deepcopy(tree), copy.deepcopy(meta))

    def rate(self, step: int, score: float) -> None:
        """Nothing is ever deleted."""

    def wait(self) -> None:
        """Nothing goes on in the background."""

    def latest(self) -> int | None:
        """The newest step that was saved."""
        return max(self.saved, default=None)

    def restore(self, step: int) -> tuple[Any, dict[str, Any]]:
        """(tree, meta) of a step."""
        return copy.deepcopy(self.saved[step])
