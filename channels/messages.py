"""The vocabulary: every message that travels between actors, as a frozen struct.

Arrays travel by reference inside a process; `trouper.channels.arrays` turns them into raw buffers at its edges.
Structs that hold arrays compare by identity (`eq=False`), since comparing arrays gives arrays.
"""

import hashlib
from typing import Any, Literal, TypeAlias

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

LossKind: TypeAlias = Literal[
    "env_error", "env_timeout", "env_died", "agent_error", "episode_timeout", "reward_error", "sampler_error"
]
"""Why an attempt was lost. A loss is a class to be counted, never a number to be learned from."""

FinishReason: TypeAlias = Literal["stop", "length"]
"""Why a generation ended: a stop id was sampled, or the token limit was reached."""

EpisodeStatus: TypeAlias = Literal["done", "truncated", "max_turns", "context_overflow"]
"""How an episode ended. All but `done` were cut short by a limit and are still trainable."""


class Task(Struct, frozen=True):
    """One prompt or scenario; a pure function of its draw number.

    Attributes:
        id: names the task in logs and quarantine lists.
        payload: what the environment and the reward functions see. Each attempt gets its own deep copy.
        environment: the name of the environment that plays it.
    """

    id: str
    payload: dict[str, Any] = {}
    environment: str = "default"


class Attempt(Struct, frozen=True):
    """One member of a training slot's group, and which try of it this is.

    Attributes:
        slot: the place in the training order; step `t` trains slots `[t * g, (t + 1) * g)`.
        draw: the number of the task in the task stream.
        member: which of the group's `num_generations` this is.
        tries: 0 for the first try; grows each time infrastructure loses the attempt.
        run_seed: the run's seed.
        task: what is to be done.
    """

    slot: int
    draw: int
    member: int
    tries: int
    run_seed: int
    task: Task

    @property
    def id(self) -> str:
        """`draw.member.tries`: unique in a run, the same after a resume."""
        return f"{self.draw}.{self.member}.{self.tries}"

    @property
    def seed(self) -> int:
        """A 31-bit seed: a pure function of (run seed, draw, member, tries)."""
        key = f"{self.run_seed}/{self.draw}/{self.member}/{self.tries}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") & 0x7FFFFFFF


class Sampling(Struct, frozen=True):
    """The distribution that tokens are drawn from; fixed for a row.

    Attributes:
        temperature: divides the logits; greater than 0 in training rows, 0 means greedy (evaluation only).
        top_p: nucleus mass in (0, 1]; 1 keeps everything.
        top_k: number of tokens kept; 0 keeps everything.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


class Turn(Struct, frozen=True, eq=False):
    """One model call.

    Attributes:
        tokens: int32 [n], the sampled ids, the stop id included when one was sampled.
        logprobs: float32 [n], log-probability of each under the distribution it was sampled from.
        versions: int32 [n], the weights' step number each was sampled under.
        finish: why it ended.
        kv_version: the oldest weights' step number that any cached key or value it attended to was made under.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish: FinishReason
    kv_version: int


class Row(Struct, frozen=True, eq=False):
    """One append-only token record: four arrays of the same length `T`, so a mask cannot drift from its ids.

    Attributes:
        tokens: int32 [T].
        loss_mask: bool [T], true exactly at sampled tokens.
        logprobs: float32 [T], the sampler's log-probs where `loss_mask` is true, 0 elsewhere.
        versions: int32 [T], the weights' step number where `loss_mask` is true, -1 elsewhere.
        sampling: the distribution the sampled tokens were drawn from.
    """

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    sampling: Sampling = Sampling()

    def __post_init__(self) -> None:
        length = len(self.tokens)
        for name in ("loss_mask", "logprobs", "versions"):
            if len(getattr(self, name)) != length:
                raise ValueError(
                    f"Row.{name} has {len(getattr(self, name))} entries and Row.tokens {length}; "
                    "the four arrays describe the same tokens and must be equally long"
                )

    @property
    def sampled(self) -> int:
        """Number of sampled tokens."""
        return int(self.loss_mask.sum())


class Message(Struct, frozen=True):
    """One chat message as a reader or a reward function sees it; the token truth is in the rows.

    Attributes:
        role: `system`, `user`, `assistant` or `tool`.
        content: its text.
    """

    role: str
    content: str


class Episode(Struct, frozen=True, eq=False):
    """A finished attempt.

    Attributes:
        attempt: which one.
        rows: the token records; more than one where the agent rewrote its context.
        reward: the scalar to learn from, or None where no reward could be given (the episode then trains nothing).
        status: how it ended.
        turns: number of model calls.
        messages: the conversation as text, for readers and judges.
        sampled_digest: the sampler's own hash of the ids it gave; empty where nobody took one.
        metrics: named numbers of this episode, averaged in the step's metrics.
        timings: seconds spent, by name.
    """

    attempt: Attempt
    rows: tuple[Row, ...]
    reward: float | None
    status: EpisodeStatus
    turns: int
    messages: tuple[Message, ...] = ()
    sampled_digest: str = ""
    metrics: dict[str, float] = {}
    timings: dict[str, float] = {}

    @property
    def sampled(self) -> int:
        """Number of sampled tokens in all rows."""
        return sum(row.sampled for row in self.rows)

    def digest(self) -> str:
        """A hash of the sampled ids of all rows, in order: what is trained is what was sampled."""
        digest = hashlib.blake2b(digest_size=16)
        for row in self.rows:
            digest.update(row.tokens[row.loss_mask].tobytes())
        return digest.hexdigest()


class Lost(Struct, frozen=True):
    """An attempt that infrastructure lost for good; it never carries a reward.

    Attributes:
        attempt: the last try.
        kind: the class that is counted.
        cause: type and message of the error.
    """

    attempt: Attempt
    kind: LossKind
    cause: str


class Void(Struct, frozen=True):
    """A slot that will never be trained.

    Attributes:
        slot: which one.
        reason: `end_of_data`, `lost` or `no_signal`.
    """

    slot: int
    reason: str


Outcome: TypeAlias = Episode | Lost | Void
"""What travels from the episode slots to the grouper."""


class Group(Struct, frozen=True, eq=False):
    """What one slot yields: its episodes with their advantages, or void with the reason.

    Attributes:
        slot: the place in the training order.
        draw: the task's number; -1 when void before anything was drawn.
        episodes: the members that arrived, in member order; empty when void.
        advantages: float32 [len(episodes)]; 0 for a member without a reward.
        void: None, or why there is nothing to train.
        lost: how many members were lost.
    """

    slot: int
    draw: int
    episodes: tuple[Episode, ...]
    advantages: NDArray[np.float32]
    void: str | None = None
    lost: int = 0


class Weights(Struct, frozen=True, eq=False):
    """A published set of parameters.

    Attributes:
        life: grows each time the learner starts again from a checkpoint; (life, step) is part of every cache key.
        step: number of optimizer steps taken.
        params: the parameters, a copy that no later step will donate.
        checksum: of the parameters in the sampler's own dtype and layout.
    """

    life: int
    step: int
    params: Any
    checksum: int

    @property
    def version(self) -> tuple[int, int]:
        """(life, step)."""
        return (self.life, self.step)


class Exited(Struct, frozen=True):
    """A supervised child's end.

    Attributes:
        name: the child's name.
        reason: `returned`, `failed`, `stopped` or `stuck`.
        attempt: how often it had been started, from 1.
        error: what it raised, if anything.
        at: the clock's time.
    """

    name: str
    reason: Literal["returned", "failed", "stopped", "stuck"]
    attempt: int
    error: BaseException | None = field(default=None)
    at: float = 0.0
