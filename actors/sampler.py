"""The sampler: answers generation requests from the engine, and takes new weights between two decode chunks.

Knows the engine's interface, not its maths: the engine is deaf to Trio and is called chunk by chunk on the
accelerator. Requests come over a bounded channel; answers, cancellations and weights travel without blocking anyone.
"""

import hashlib
from collections.abc import Callable
from typing import Any, Literal, Protocol

import numpy as np
import trio
from msgspec import Struct
from numpy.typing import NDArray

from trouper.actors.accelerator import Accelerator
from trouper.channels import Receiver, Reply, SamplerError, Sampling, Sender, SyncError, Turn, Weights
from trouper.learner.engine import Finished, Request

MAX_DELIVERIES = 2
"""How often a request may be in flight when the sampler dies before it is failed instead of tried again."""


class GenerationEngine(Protocol):
    """What the sampler needs of `trouper.learner.engine.Engine`."""

    def check(self, request: Request) -> None:
        """Raise `SamplerError` for a request that can never be served."""

    def submit(self, request: Request) -> None:
        """Queue a request."""

    def step(self) -> list[Finished]:
        """Admit what waits, decode one chunk, return what ended."""

    def swap(self, params: Any, version: tuple[int, int], kv: Literal["keep", "recompute"]) -> None:
        """Sample under other weights from now on."""

    def cancel(self, id: int) -> None:
        """Forget a request."""

    def release(self, conversation: int) -> None:
        """Forget a conversation's keys and values."""

    def warm_up(self) -> None:
        """Compile every shape."""

    def checksum(self) -> int:
        """Of the parameters in use, in the engine's own dtype and layout."""


class Generate(Struct, frozen=True, eq=False):
    """One request to a sampler and the place for its answer."""

    request: Request
    reply: Reply[Turn]


class _Update(Struct, frozen=True, eq=False):
    weights: Weights
    reply: Reply[int]


class Sampler:
    """One engine as an actor. The object outlives its lives: a restart rebuilds the engine and asks again.

    Args:
        make_engine: builds an engine that holds the given weights; called at every start.
        weights: the first weights.
        accelerator: where the engine's calls run.
        max_waiting: requests taken off the channel and not yet submitted; beyond it the channel fills up.
        mode: how new weights come in; see `trouper.actors.config.Sync`.
        kv: what happens to keys and values of older weights.
        drain_timeout: seconds that `drain` waits for running generations.

    Attributes:
        weights: the newest that the engine was given.
        sampled_tokens: so far.
        ended: every asker has ended, and it with them: nothing will be sampled any more.
    """

    def __init__(
        self,
        make_engine: Callable[[Weights], GenerationEngine],
        weights: Weights,
        accelerator: Accelerator,
        *,
        max_waiting: int,
        mode: Literal["in_flight", "drain"] = "in_flight",
        kv: Literal["keep", "recompute"] = "keep",
        drain_timeout: float = 60.0,
    ) -> None:
        self.weights = weights
        self._make_engine = make_engine
        self._accelerator = accelerator
        self._max_waiting = max_waiting
        self._mode = mode
        self._kv = kv
        self._drain_timeout = drain_timeout
        self._waiting: dict[int, Generate] = {}
        self._running: dict[int, Generate] = {}
        self._deliveries: dict[int, int] = {}
        self._cancelled: list[int] = []
        self._released: list[int] = []
        self._update: _Update | None = None
        self._closed = False
        self._change = trio.lowlevel.ParkingLot()
        self._space = trio.lowlevel.ParkingLot()
        self._next_id = 0
        self.sampled_tokens = 0
        self.ended = False

    # ------------------------------------------------------------------ called by other actors, never blocking

    def next_id(self) -> int:
        """An id for a request or a conversation that was never used in this process."""
        self._next_id += 1
        return self._next_id

    def cancel(self, id: int) -> None:
        """The asker of this request has gone."""
        if self._waiting.pop(id, None) is not None:
            self._deliveries.pop(id, None)
            self._space.unpark_all()
        elif id in self._running:
            self._cancelled.append(id)
            self._change.unpark_all()

    def release(self, conversation: int) -> None:
        """No further turn of this conversation will come."""
        self._released.append(conversation)

    async def update(self, weights: Weights) -> int:
        """Swap to these weights; returns the checksum of what the engine then holds."""
        update = _Update(weights, Reply())
        if self._update is not None:
            self._update.reply.fail(SyncError(f"weights {self._update.weights.version} were overtaken"))
        self._update = update
        self._change.unpark_all()
        try:
            return await update.reply.wait()
        finally:
            if self._update is update:
                self._update = None
            self._change.unpark_all()

    # ------------------------------------------------------------------ the actor

    async def run(
        self, requests: Receiver[Generate], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until every asker has ended and everything asked is answered."""
        engine = await self._accelerator.run(self._make_engine, self.weights)
        await self._accelerator.run(engine.warm_up)
        self._ask_again()
        task_status.started()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._take_in, requests, engine)
            await self._serve(engine)
            nursery.cancel_scope.cancel()

    def _ask_again(self) -> None:
        self._cancelled.clear()
        self._released.clear()  # a new engine knows no conversations
        again, self._running = self._running, {}
        for id, generate in again.items():
            if generate.reply.answered:  # its asker went while nothing ran here
                del self._deliveries[id]
            elif self._deliveries[id] >= MAX_DELIVERIES:
                del self._deliveries[id]
                generate.reply.fail(SamplerError(f"request {id} was in flight each of {MAX_DELIVERIES} times it died"))
            else:
                self._waiting[id] = generate

    async def _take_in(self, requests: Receiver[Generate], engine: GenerationEngine) -> None:
        self._closed = False
        async for generate in requests:
            if generate.reply.answered:  # its asker has gone
                continue
            try:
                engine.check(generate.request)
            except SamplerError as error:
                generate.reply.fail(error)
                continue
            self._waiting[generate.request.id] = generate
            self._change.unpark_all()
            while len(self._waiting) >= self._max_waiting:
                await self._space.park()
        self._closed = True
        self._change.unpark_all()

    async def _serve(self, engine: GenerationEngine) -> None:
        drain_until: float | None = None
        while True:
            self._forget(engine)
            update = self._update
            if update is not None and self._mode == "drain" and drain_until is None:
                drain_until = trio.current_time() + self._drain_timeout
            if update is not None and (
                self._mode == "in_flight" or not self._running or trio.current_time() >= (drain_until or 0.0)
            ):
                await self._swap(engine, update)
                drain_until = None
                continue
            if update is None:
                drain_until = None
                self._submit(engine)
            if self._running:
                for finished in await self._accelerator.run(engine.step):
                    self._answer(finished)
            elif self._closed and not self._waiting and update is None:
                self.ended = True
                return
            else:
                await self._change.park()

    def _forget(self, engine: GenerationEngine) -> None:
        cancelled, self._cancelled = self._cancelled, []
        for id in cancelled:
            if self._running.pop(id, None) is not None:
                del self._deliveries[id]
                engine.cancel(id)
        released, self._released = self._released, []
        for conversation in released:
            engine.release(conversation)

    def _submit(self, engine: GenerationEngine) -> None:
        for id, generate in self._waiting.items():
            engine.submit(generate.request)
            self._running[id] = generate
            self._deliveries[id] = self._deliveries.get(id, 0) + 1
        self._waiting.clear()
        self._space.unpark_all()

    async def _swap(self, engine: GenerationEngine, update: _Update) -> None:
        weights = update.weights
        await self._accelerator.run(engine.swap, weights.params, weights.version, self._kv)
        checksum = await self._accelerator.run(engine.checksum)
        self.weights = weights
        if self._update is update:
            self._update = None
        update.reply.set(checksum)

    def _answer(self, finished: Finished) -> None:
        generate = self._running.pop(finished.id, None)
        if generate is not None:  # else it was cancelled while the chunk ran
            del self._deliveries[finished.id]
            self.sampled_tokens += len(finished.turn.tokens)
            generate.reply.set(finished.turn)


class Generator:
    """One conversation's way to a sampler: what `Conversation` calls to get a turn.

    Args:
        sampler: who answers.
        requests: the channel to it.
        seed: of the attempt; with a token's position it decides the token.
        attempt_scope: what a failure of the sampler cancels, so that agent code never sees it.

    Attributes:
        failure: what the sampler could not do, if anything.
        seconds: spent waiting for turns.
    """

    def __init__(
        self, sampler: Sampler, requests: Sender[Generate], seed: int, attempt_scope: trio.CancelScope
    ) -> None:
        self._sampler = sampler
        self._requests = requests
        # Attempts of training and evaluation share draws and members: only a number of its own is unique.
        self._conversation = sampler.next_id()
        self._seed = self._row_seed = seed
        self._reached = self._rewrites = 0
        self._attempt_scope = attempt_scope
        self.failure: SamplerError | None = None
        self._digest = hashlib.blake2b(digest_size=16)
        self.seconds = 0.0

    async def __call__(
        self, tokens: NDArray[np.int32], *, max_tokens: int, stop: tuple[int, ...], sampling: Sampling
    ) -> Turn:
        """One model call over the whole context; a caller that is cancelled takes its request back.

        A context that was rewritten comes to positions where tokens were drawn before: with the same seed an agent
        that tries a turn again would get it word for word.
        """
        if len(tokens) < self._reached:
            self._rewrites += 1
            key = f"{self._seed}/{self._rewrites}".encode()
            self._row_seed = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little")
            self._reached = 0
        request = Request(
            id=self._sampler.next_id(),
            conversation=self._conversation,
            tokens=tokens,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=stop,
            seed=self._row_seed,
        )
        generate = Generate(request, Reply())
        started = trio.current_time()
        try:
            await self._requests.send(generate)
            turn = await generate.reply.wait()
            self._digest.update(turn.tokens.tobytes())
            self._reached = len(tokens) + len(turn.tokens)
            return turn
        except SamplerError as error:
            self.failure = error
            self._attempt_scope.cancel()
            await trio.lowlevel.checkpoint_if_cancelled()
            raise
        finally:
            self.seconds += trio.current_time() - started
            if not generate.reply.answered:
                generate.reply.fail(SamplerError(f"nobody waits for request {request.id} any more"))
                self._sampler.cancel(request.id)

    def digest(self) -> str:
        """A hash of all ids that were sampled, in order; `Episode.digest` must equal it."""
        return self._digest.hexdigest()

    def close(self) -> None:
        """The conversation is over."""
        self._sampler.release(self._conversation)
