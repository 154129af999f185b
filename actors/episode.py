"""Episode slots: each plays one attempt after another, agent beside environment, and retries what infrastructure lost.

A slot has two tasks for its whole life: this one runs the agent, `EnvironmentActor` owns the environment. A failure
of the environment, a reward function, the sampler or the agent's own code costs the attempt, which is tried again in
the same slot with a seed of its own; after `max_attempts` it is `Lost`. Nothing that failed ever becomes a reward.
"""

import traceback
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Literal, get_args

import msgspec
import trio
from msgspec import Struct

from trouper.actors.accelerator import name_of
from trouper.actors.account import CallTimes
from trouper.actors.alarms import Alarms
from trouper.actors.backoff import Backoff
from trouper.actors.config import Environment as Deadlines
from trouper.actors.environment import CALL_GRACE, EnvironmentActor
from trouper.actors.generator import Generator
from trouper.actors.sampler import Generate, Sampler
from trouper.actors.threads import StillRuns, Threads
from trouper.actors.trace import NO_TRACE, Trace, Track, flow_of
from trouper.actors.unshared import unshared
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
    causes,
    first_leaf,
)
from trouper.envs import Agent, Chat, Conversation, ConversationOver, Rewards
from trouper.envs.rewards import checked_reward

BREAKER_WINDOW = 256
"""Attempts over which the share of lost ones is taken."""

TRACED_SLOTS = 16
"""Slots of the trace; the others are counted and timed, but their spans would only make it larger."""

CANCEL_PATIENCE = 10.0
"""Seconds that an agent has to end when it is cancelled; then it is left behind."""


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
        trace: takes the spans of the first slots.
        kind: what the trace calls these slots.

    Attributes:
        calls: how long environments, tools and reward functions took.
        attempts: how long attempts took that have ended, and their parts `generate` and `environment`.
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
        trace: Trace = NO_TRACE,
        kind: Literal["training", "evaluation"] = "training",
    ) -> None:
        self._concurrency = concurrency
        self._trace = trace
        self._kind = kind
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
        self._alarms = Alarms()
        self._environments: list[EnvironmentActor] = []
        self._restarts_before = 0  # those of earlier lives
        self._explained: set[tuple[str, str, int | None]] = set()
        self.breaker = breaker
        self.busy = 0
        self.calls = CallTimes()
        self.attempts = CallTimes()

    @property
    def restarts(self) -> int:
        """Environments thrown away so far."""
        return self._restarts_before + sum(environment.restarts for environment in self._environments)

    async def run(self, inbox: Receiver[Attempt], outbox: Sender[Outcome], requests: Sender[Generate]) -> None:
        """Play every attempt that comes."""
        self._restarts_before, self._environments = self.restarts, []
        try:
            async with trio.open_nursery() as alarms:
                alarms.start_soon(self._alarms.run)
                async with trio.open_nursery() as slots:

                    def failed(error: BaseException) -> None:
                        slots.start_soon(_raise, error)

                    for index in range(self._concurrency):
                        slots.start_soon(self._slot, index, inbox, outbox, requests, failed)
                alarms.cancel_scope.cancel()
        except* RunError as failures:  # several slots may find out at the same moment: the first speaks for all
            raise first_leaf(failures) from None
        finally:
            await self._threads.close()

    async def _slot(
        self,
        index: int,
        inbox: Receiver[Attempt],
        outbox: Sender[Outcome],
        requests: Sender[Generate],
        failed: Callable[[BaseException], None],
    ) -> None:
        deadlines = self._deadlines
        backoff = Backoff(str(index), first=deadlines.restart_backoff, longest=deadlines.restart_backoff_max)
        trace = self._trace if index < TRACED_SLOTS else NO_TRACE
        group, prefix = ("episodes", "") if self._kind == "training" else (self._kind, f"{self._kind} ")
        track = trace.track(f"{prefix}slot {index}", group=group)
        made = count()

        def new() -> EnvironmentActor:
            # One that is left behind in a call ends its span whenever it does: the next has a track of its own.
            own = trace.track(f"{prefix}environment {index}" + "'" * next(made), group=group)
            world = EnvironmentActor(
                self._make_environment, deadlines, self._worlds, self._alarms, backoff, self._note, self.calls, own
            )
            self._environments.append(world)
            world.start(failed)
            return world

        stage = _Stage(new)
        try:
            async for attempt in inbox:
                self.busy += 1
                try:
                    outcome = await self._play(attempt, stage, requests, track)
                finally:
                    self.busy -= 1
                await outbox.send(outcome)
                del outcome  # the next one may take long to come
        finally:
            await stage.close()

    async def _play(self, attempt: Attempt, stage: "_Stage", requests: Sender[Generate], track: Track) -> Outcome:
        while True:
            with track.span("attempt", task=attempt.task.id, attempt=attempt.id):
                outcome = await self._try(attempt, await stage.world(), requests, track)
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
        self, attempt: Attempt, world: EnvironmentActor, requests: Sender[Generate], track: Track
    ) -> Episode | BaseException:
        """The episode, or what it was lost by."""
        started = trio.current_time()
        scope = trio.CancelScope(deadline=started + self._rules.episode_timeout)
        # The draws of evaluation are other tasks under the same numbers, and nothing trains them.
        flows = (flow_of(attempt),) if self._kind == "training" else ()
        generator = Generator(self._sampler, requests, attempt.seed, scope, track, flows)
        episode: Episode | None = None
        error: BaseException | None = None
        with scope:
            try:
                world.begin(attempt.task, attempt.seed, scope)
                episode = await self._episode(attempt, world, generator, started, track)
            except* RunError:
                raise
            except* Exception as group:  # agents, rewards and samplers may raise anything: the attempt is lost
                error = first_leaf(group)
        generator.close()
        self.attempts.add("attempt", trio.current_time() - started)
        self.attempts.add("generate", generator.seconds)
        self.attempts.add("environment", world.seconds)
        limit = f"rollout.episode_timeout = {self._rules.episode_timeout:g} s"
        too_slow = EnvironmentFailure("episode_timeout", f"the attempt took longer than {limit}")
        return world.failure or generator.failure or error or episode or too_slow

    def _lost(self, attempt: Attempt, error: BaseException) -> Lost:
        cause = str(error) if isinstance(error, TrouperError) else f"{type(error).__name__}: {error}"
        lost = Lost(attempt, _kind(error), cause)
        self._note(f"attempt {attempt.id} of task {attempt.task.id!r} was lost: {lost.kind}: {cause}")
        *_, error = causes(error)
        frames = traceback.extract_tb(error.__traceback__)
        place = (type(error).__name__, *((frames[-1].filename, frames[-1].lineno) if frames else (str(error), None)))
        if not isinstance(error, TrouperError) and place not in self._explained:
            self._explained.add(place)  # whoever wrote that code wants to see this, but only once
            self._note("".join(traceback.format_exception(error)).rstrip())
        return lost

    async def _episode(
        self, attempt: Attempt, world: EnvironmentActor, generator: Generator, started: float, track: Track
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
            await self._act(talk, world)
        except* ConversationOver:
            pass  # turns or context are used up: `talk.status` says which
        score = await world.score()
        judged = await self._rewards.score(
            world.task, talk.messages, partial(self._judge, self._deadlines.reward_timeout, track)
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

    async def _act(self, talk: Conversation, world: EnvironmentActor) -> None:
        play = partial(self._agent, talk, world)
        try:
            await self._threads.aside(play, lambda: CANCEL_PATIENCE, f"the agent of task {world.task.id!r}")
        except* StillRuns as left:
            await world.close()  # it may go on to play in it, and the next attempt must not be the one it plays in
            raise EnvironmentFailure(
                "agent_error",
                f"the agent did not end when it was cancelled {CANCEL_PATIENCE:g} s ago and is left behind: "
                f"{first_leaf(left)}. Catch Exception where it catches BaseException or everything, give a "
                "trio.CancelScope(shield=True) a deadline, and trio.to_thread.run_sync abandon_on_cancel=True",
            ) from None

    async def _judge(self, limit: float, track: Track, function: Callable[[], Any]) -> Any:
        label, started = f"reward:{name_of(function)}", trio.current_time()
        call = partial(self._threads.call, function)
        try:
            with track.span(label), trio.move_on_after(limit):
                return await self._threads.aside(call, lambda: CALL_GRACE, label)
        except* StillRuns:
            pass  # left behind and counted
        finally:
            self.calls.add(label, trio.current_time() - started)
        raise TimeoutError(f"it took longer than environment.reward_timeout = {limit:g} s")


class _Stage:
    """The environment of a slot; one that hangs for good is left behind, and another one takes its place."""

    def __init__(self, new: Callable[[], EnvironmentActor]) -> None:
        self._new = new
        self._world = new()

    async def world(self) -> EnvironmentActor:
        """One that can be asked."""
        await self._world.settle()
        if self._world.lost:
            self._world = self._new()
        return self._world

    async def close(self) -> None:
        """Close it, in bounded time."""
        await self._world.close()


async def _raise(error: BaseException) -> None:
    raise error


def _kind(error: BaseException) -> LossKind:
    if isinstance(error, EnvironmentFailure):
        return error.kind if error.kind in get_args(LossKind) else "env_error"  # type: ignore[return-value]
    if isinstance(error, RewardError):
        return "reward_error"
    return "sampler_error" if isinstance(error, SamplerError) else "agent_error"
