"""Episode slots: each plays one attempt after another, agent beside environment, and retries what infrastructure lost.

A slot has two tasks for its whole life: this one runs the agent, `EnvironmentActor` owns the environment. A failure
of the environment, a reward function, the sampler or the agent's own code costs the attempt, which is tried again in
the same slot with a seed of its own; after `max_attempts` it is `Lost`. Nothing that failed ever becomes a reward.
"""

import contextlib
import inspect
import threading
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Literal, get_args

import msgspec
import trio
from msgspec import Struct

from trouper.actors.backoff import Backoff
from trouper.actors.config import Environment as Deadlines
from trouper.actors.environment import EnvironmentActor, first_leaf
from trouper.actors.generator import Generator
from trouper.actors.sampler import Generate, Sampler
from trouper.actors.threads import Threads, as_failure, is_async
from trouper.channels import (
    Attempt,
    EnvironmentFailure,
    Episode,
    EpisodeStatus,
    HopelessRun,
    LossKind,
    Lost,
    Outcome,
    Receiver,
    RewardError,
    RunError,
    SamplerError,
    Sampling,
    Sender,
    TrouperError,
)
from trouper.envs import Agent, Chat, Conversation, ConversationOver, Rewards
from trouper.envs.rewards import checked_reward

BREAKER_WINDOW = 256
"""Attempts over which the share of lost ones is taken."""

CANCEL_PATIENCE = 10.0
"""Seconds after which an agent that was cancelled and still runs is named."""


class Breaker:
    """Ends a run whose attempts are lost one after another: waiting would not make it better.

    Args:
        max_consecutive_lost: this many in a row are one too many.
        max_lost_fraction: more than this share of the last 256 is too much.
    """

    def __init__(self, max_consecutive_lost: int, max_lost_fraction: float) -> None:
        self.lost: Counter[str] = Counter()
        self._max_consecutive = max_consecutive_lost
        self._max_fraction = max_lost_fraction
        self._recent: deque[bool] = deque(maxlen=BREAKER_WINDOW)
        self._consecutive = 0
        self._first: dict[str, str] = {}

    def survived(self) -> None:
        """An attempt came to its end."""
        self._recent.append(False)
        self._consecutive = 0

    def lose(self, kind: LossKind, cause: str) -> None:
        """An attempt was lost.

        Raises:
            HopelessRun: one too many.
        """
        self.lost[kind] += 1
        self._first.setdefault(kind, cause)
        self._recent.append(True)
        self._consecutive += 1
        share = sum(self._recent) / BREAKER_WINDOW
        if self._consecutive >= self._max_consecutive:
            limit = f"{self._consecutive} attempts in a row were lost (rollout.max_consecutive_lost)"
        elif len(self._recent) == BREAKER_WINDOW and share > self._max_fraction:
            limit = (
                f"{share:.0%} of the last {BREAKER_WINDOW} attempts were lost; "
                f"rollout.max_lost_fraction allows {self._max_fraction:.0%}"
            )
        else:
            return
        counts = ", ".join(f"{kind} {count}" for kind, count in self.lost.most_common())
        raise HopelessRun(f"{limit}. Lost so far: {counts}. First cause of {kind}: {self._first[kind]}")


class EpisodeRules(Struct, frozen=True, kw_only=True):
    """How episodes are played; the fields are those of `[sampling]`, `[rollout]` and `[chat]`."""

    sampling: Sampling
    max_prompt_tokens: int
    max_response_tokens: int
    max_turns: int
    max_context_tokens: int
    episode_timeout: float
    max_attempts: int
    on_rewrite: Literal["fork", "append"] = "fork"


class EpisodeSlots:
    """All slots of one kind of episode, as one actor.

    Args:
        concurrency: number of slots.
        make_environment: makes one environment object.
        agent: plays.
        chat: turns text into ids.
        rewards: judge finished episodes.
        rules: limits and sampling.
        deadlines: the `[environment]` section.
        sampler: answers the requests.
        breaker: counts lost attempts.
        note: told what is worth a line in the log.
    """

    def __init__(
        self,
        concurrency: int,
        *,
        make_environment: Callable[[], Any],
        agent: Agent,
        chat: Chat,
        rewards: Rewards,
        rules: EpisodeRules,
        deadlines: Deadlines,
        sampler: Sampler,
        breaker: Breaker,
        note: Callable[[str], None],
    ) -> None:
        self._concurrency = concurrency
        self._make_environment = unshared(make_environment)
        self._agent = agent
        self._chat = chat
        self._rewards = rewards
        self._rules = rules
        self._deadlines = deadlines
        self._sampler = sampler
        self._note = note
        threads = partial(Threads, 2 * concurrency, deadlines.max_abandoned_threads, deadlines.isolation)
        self._threads = threads(deadlines.async_library)
        # What stands for an environment in a process of its own is Trio's here, whatever it is there.
        self._worlds = threads() if deadlines.isolation == "process" else self._threads
        self._environments: list[EnvironmentActor] = []
        self._restarts_before = 0  # those of earlier lives
        self._explained: set[tuple[str, str, int | None]] = set()
        self.breaker = breaker
        self.busy = 0

    @property
    def restarts(self) -> int:
        """Environments thrown away so far."""
        return self._restarts_before + sum(environment.restarts for environment in self._environments)

    async def run(self, inbox: Receiver[Attempt], outbox: Sender[Outcome], requests: Sender[Generate]) -> None:
        """Play every attempt that comes."""
        self._restarts_before, self._environments = self.restarts, []
        try:
            async with trio.open_nursery() as nursery:
                for index in range(self._concurrency):
                    nursery.start_soon(self._slot, index, inbox, outbox, requests)
        except* RunError as failures:  # several slots may find out at the same moment: the first speaks for all
            raise first_leaf(failures) from None
        finally:
            await self._threads.close()

    async def _slot(
        self, index: int, inbox: Receiver[Attempt], outbox: Sender[Outcome], requests: Sender[Generate]
    ) -> None:
        deadlines = self._deadlines
        backoff = Backoff(str(index), first=deadlines.restart_backoff, longest=deadlines.restart_backoff_max)
        world = EnvironmentActor(self._make_environment, deadlines, self._worlds, backoff, self._note)
        self._environments.append(world)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.serve)
            async for attempt in inbox:
                self.busy += 1
                try:
                    outcome = await self._play(attempt, world, requests)
                finally:
                    self.busy -= 1
                await outbox.send(outcome)
                del outcome  # the next one may take long to come
            nursery.cancel_scope.cancel()

    async def _play(self, attempt: Attempt, world: EnvironmentActor, requests: Sender[Generate]) -> Outcome:
        while True:
            outcome = await self._try(attempt, world, requests)
            if isinstance(outcome, Episode):
                self.breaker.survived()
                return outcome
            lost = self._lost(attempt, outcome)
            self.breaker.lose(lost.kind, lost.cause)
            for_good = isinstance(outcome, EnvironmentFailure) and not outcome.retry
            if for_good or attempt.tries + 1 >= self._rules.max_attempts:
                return lost
            attempt = msgspec.structs.replace(attempt, tries=attempt.tries + 1)

    async def _try(
        self, attempt: Attempt, world: EnvironmentActor, requests: Sender[Generate]
    ) -> Episode | BaseException:
        """The episode, or what it was lost by."""
        started = trio.current_time()
        scope = trio.CancelScope(deadline=started + self._rules.episode_timeout)
        generator = Generator(self._sampler, requests, attempt.seed, scope)
        episode: Episode | None = None
        error: BaseException | None = None
        with scope:
            world.begin(attempt.task, attempt.seed, scope)
            try:
                episode = await self._episode(attempt, world, generator, started)
            except* RunError:
                raise
            except* Exception as group:  # agents, rewards and samplers may raise anything: the attempt is lost
                error = first_leaf(group)
        generator.close()
        limit = f"rollout.episode_timeout = {self._rules.episode_timeout:g} s"
        too_slow = EnvironmentFailure("episode_timeout", f"the attempt took longer than {limit}")
        return world.failure or generator.failure or error or episode or too_slow

    def _lost(self, attempt: Attempt, error: BaseException) -> Lost:
        cause = str(error) if isinstance(error, TrouperError) else f"{type(error).__name__}: {error}"
        lost = Lost(attempt, _kind(error), cause)
        self._note(f"attempt {attempt.id} of task {attempt.task.id!r} was lost: {lost.kind}: {cause}")
        seen = {error}
        while error.__cause__ is not None and error.__cause__ not in seen:  # `raise error from error` is its own cause
            error = error.__cause__
            seen.add(error)
        frames = traceback.extract_tb(error.__traceback__)
        place = (type(error).__name__, *((frames[-1].filename, frames[-1].lineno) if frames else (str(error), None)))
        if not isinstance(error, TrouperError) and place not in self._explained:
            self._explained.add(place)  # whoever wrote that code wants to see this, but only once
            self._note("".join(traceback.format_exception(error)).rstrip())
        return lost

    async def _episode(
        self, attempt: Attempt, world: EnvironmentActor, generator: Generator, started: float
    ) -> Episode:
        rules = self._rules
        talk = Conversation(
            self._chat,
            generator,
            sampling=rules.sampling,
            max_context=rules.max_context_tokens,
            max_response_tokens=rules.max_response_tokens,
            max_turns=rules.max_turns,
            max_prompt_tokens=rules.max_prompt_tokens,
            on_rewrite=rules.on_rewrite,
        )
        await world.prepare()
        try:
            await self._act(attempt, talk, world)
        except* ConversationOver:
            pass  # turns or context are used up: `talk.status` says which
        score = await world.score()
        judged = await self._rewards.score(
            world.task, talk.messages, partial(self._judge, self._deadlines.reward_timeout)
        )
        parts = [value for value in (score, judged.total) if value is not None]
        status: EpisodeStatus = talk.status
        if status == "done" and world.truncated:
            status = "truncated"
        metrics = {**world.metrics, **talk.metrics}
        metrics.update({f"rewards/{name}": value for name, value in judged.parts.items() if value is not None})
        # A function that cannot judge leaves the episode without a reward: what the others gave is not the whole.
        judgeless = None in (score, *judged.parts.values())
        now = trio.current_time()
        return Episode(
            attempt=attempt,
            rows=talk.rows(),
            reward=None if judgeless else checked_reward("the sum of all rewards", sum(parts)),
            status=status,
            turns=talk.turns,
            messages=talk.messages,
            sampled_digest=generator.digest(),
            metrics=metrics,
            timings={"total": now - started, "generate": generator.seconds, "environment": world.seconds},
        )

    async def _act(self, attempt: Attempt, talk: Conversation, world: EnvironmentActor) -> None:
        over = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, attempt, over)
            try:
                await self._agent(talk, world)
            except BaseException as error:
                failure = as_failure(error)
                if failure is error:
                    raise
                raise failure from error
            finally:
                over.set()

    async def _watch(self, attempt: Attempt, over: trio.Event) -> None:
        """Name an agent that does not end when it is cancelled: nobody can end it."""
        try:
            await over.wait()
        except trio.Cancelled:
            with trio.move_on_after(CANCEL_PATIENCE, shield=True):
                await over.wait()
            if not over.is_set():
                self._note(
                    f"the agent of attempt {attempt.id} was cancelled {CANCEL_PATIENCE:g} s ago and goes on; its slot "
                    "and the end of the run wait for it. Catch Exception where it catches BaseException or everything, "
                    "and give a trio.CancelScope(shield=True) a deadline"
                )
            raise

    async def _judge(self, limit: float, function: Callable[[], Any]) -> Any:
        try:
            with trio.fail_after(limit):
                return await self._threads.call(function)
        except trio.TooSlowError:
            raise TimeoutError(f"it took longer than environment.reward_timeout = {limit:g} s") from None


def unshared(make: Callable[[], Any]) -> Callable[[], Any]:
    """`make`, but an environment that it hands out a second time ends the run.

    Two episodes in one object would see each other's state, and so would the next life of one that failed. A class
    that can bear it says so with `thread_safe = True`.
    """
    made: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
    registering = threading.Lock()  # plain factories run in several threads

    def checked(environment: Any) -> Any:
        if getattr(environment, "thread_safe", False):
            return environment
        with registering:
            if made.get(id(environment)) is environment:
                raise RunError(
                    f"the environment factory returned the same {type(environment).__qualname__} object twice; its "
                    "episodes would share their state. Return a new one from every call, or mark the class with "
                    "thread_safe = True"
                )
            with contextlib.suppress(TypeError):  # a class with __slots__ and no weak references goes unchecked
                made[id(environment)] = environment
        return environment

    async def later(environment: Awaitable[Any]) -> Any:
        return checked(await environment)

    async def make_async() -> Any:
        return await later(make())

    def make_plain() -> Any:
        value = make()
        return later(value) if inspect.isawaitable(value) else checked(value)

    return make_async if is_async(make) else make_plain


def _kind(error: BaseException) -> LossKind:
    if isinstance(error, EnvironmentFailure):
        return error.kind if error.kind in get_args(LossKind) else "env_error"  # type: ignore[return-value]
    if isinstance(error, RewardError):
        return "reward_error"
    return "sampler_error" if isinstance(error, SamplerError) else "agent_error"
