"""Episode slots over a real sampler: what is lost is counted, tried again, and never becomes a reward."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import trio

from trouper.actors.aside import stuck
from trouper.actors.config import Environment as Deadlines
from trouper.actors.episode import BREAKER_WINDOW, Breaker, EpisodeRules, EpisodeSlots
from trouper.actors.sampler import Generate, Sampler
from trouper.actors.simulation import SimulatedAccelerator, SimulatedEngine, SimulatedLearner
from trouper.channels import (
    Attempt,
    Channel,
    EnvironmentFailure,
    HopelessRun,
    Lost,
    Message,
    Outcome,
    RunError,
    SamplerError,
    Sampling,
    Task,
)
from trouper.envs import ConversationOver, PlainChat, Rewards, StepResult, model_agent

RULES = EpisodeRules(
    sampling=Sampling(),
    max_prompt_tokens=8,
    max_response_tokens=4,
    max_turns=4,
    max_context_tokens=64,
    episode_timeout=1000.0,
    max_attempts=3,
)


class Slots:
    """Plays attempts and keeps what came of them."""

    def __init__(
        self,
        environment: Any,
        agent: Any = model_agent,
        rewards: dict[str, Any] | None = None,
        *,
        concurrency: int = 2,
        engine: Any = SimulatedEngine,
        breaker: Breaker | None = None,
        isolation: str = "inline",
        deadlines: dict[str, Any] | None = None,
        **rules: Any,
    ) -> None:
        self.notes: list[str] = []
        self.breaker = breaker or Breaker(1000, 1.0)
        learner = SimulatedLearner()
        self.sampler = Sampler(engine, learner.weights(), SimulatedAccelerator("sampler"), max_waiting=8)
        self.slots = EpisodeSlots(
            concurrency,
            make_environment=environment,
            agent=agent,
            chat=PlainChat("abcdefghijklmno;", ";"),
            rewards=Rewards(rewards or {}, [1.0] * len(rewards or {})),
            rules=msgspec.structs.replace(RULES, **rules),
            deadlines=Deadlines(isolation=isolation, **(deadlines or {})),  # type: ignore[arg-type]
            sampler=self.sampler,
            breaker=self.breaker,
            note=self.notes.append,
        )

    async def play(self, *members: int, task: Task | None = None) -> list[Any]:
        """Outcomes by member."""
        task = task or Task("t", {"seen": []})
        inbox = Channel[Attempt]("tasks", Attempt, len(members))
        outbox = Channel[Outcome]("episodes", Outcome, len(members))
        requests = Channel[Generate]("requests", Generate, 2)
        async with trio.open_nursery() as nursery:
            await nursery.start(self.sampler.run, requests.receiver())
            with inbox.sender() as sender:
                for member in members:
                    await sender.send(Attempt(0, 0, member, 0, 7, task))
            inbox.finish()
            with requests.sender() as asks:
                requests.finish()
                await self.slots.run(inbox.receiver(), outbox.sender(), asks)
        receiver = outbox.receiver()
        outcomes = [receiver.receive_nowait() for _ in members]
        return sorted(outcomes, key=lambda outcome: outcome.attempt.member)


class Fails:
    """An environment in which `fail` happens at its first call of a name."""

    def __init__(self, where: str, fail: Callable[[], Any]) -> None:
        self._where, self._fail = where, fail

    async def _maybe(self, where: str) -> None:
        if where == self._where:
            await self._fail()

    async def reset(self, task: Task) -> str:
        await self._maybe("reset")
        return "a"

    async def step(self, action: str) -> StepResult:
        await self._maybe("step")
        return StepResult("b", reward=1.0, done=True)

    async def reward(self) -> float:
        await self._maybe("reward")
        return 1.0


def leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def broken() -> None:
    raise ValueError("env 42")


def calm() -> Fails:
    return Fails("", broken)


async def swallow_all(talk: Any, world: Any) -> None:
    """Agent code at its worst: whatever happens, it says that it is done."""
    try:
        await model_agent(talk, world)
    except Exception:
        return


class Refusing(SimulatedEngine):
    def check(self, request: Any) -> None:
        raise SamplerError("the context is too long by far")


def impossible() -> Any:
    raise ConnectionError("no room")


@pytest.mark.parametrize("agent", [model_agent, swallow_all])
@pytest.mark.parametrize(
    ("given", "kind", "cause"),
    [
        ({"environment": partial(Fails, "reset", broken)}, "env_error", "reset: ValueError: env 42"),
        ({"environment": partial(Fails, "step", broken)}, "env_error", "step: ValueError: env 42"),
        ({"environment": partial(Fails, "reward", broken)}, "env_error", "score: ValueError: env 42"),
        ({"environment": partial(Fails, "step", trio.sleep_forever)}, "env_timeout", "step took longer than"),
        ({"environment": impossible}, "env_error", "create: ConnectionError: no room"),
        ({"environment": calm, "engine": Refusing}, "sampler_error", "the context is too long by far"),
    ],
)
async def test_failures_never_become_rewards(autojump_clock, agent, given, kind, cause) -> None:
    slots = Slots(agent=agent, **given)
    (lost,) = await slots.play(0)
    assert isinstance(lost, Lost)
    assert (lost.kind, lost.attempt.tries) == (kind, 2)
    assert cause in lost.cause
    assert slots.breaker.lost == {kind: 3}


async def test_an_agent_that_raises_loses_the_attempt(autojump_clock) -> None:
    async def clumsy(talk: Any, world: Any) -> None:
        raise LookupError("page 3")

    slots = Slots(calm, clumsy)
    (lost,) = await slots.play(0)
    assert (lost.kind, lost.cause) == ("agent_error", "LookupError: page 3")
    traces = [note for note in slots.notes if "Traceback" in note]
    assert len(slots.notes) == 4  # three attempts, and one traceback: the same place is shown once
    assert len(traces) == 1
    assert "in clumsy" in traces[0]


async def test_a_hanging_agent_is_ended_by_the_episode_timeout(autojump_clock) -> None:
    async def asleep(talk: Any, world: Any) -> None:
        await trio.sleep_forever()

    (lost,) = await Slots(calm, asleep, episode_timeout=50.0, max_attempts=2).play(0)
    assert lost.kind == "episode_timeout"
    assert "rollout.episode_timeout = 50 s" in lost.cause
    assert trio.current_time() < 101


async def test_a_lost_attempt_is_tried_again_with_another_seed_and_its_siblings_go_on(autojump_clock) -> None:
    played: list[tuple[int, int]] = []

    async def unlucky(talk: Any, world: Any) -> None:
        await model_agent(talk, world)
        if len(played) < 2:
            played.append((talk.rows()[0].tokens.tolist(), 0))
            raise ValueError("env 42")

    slots = Slots(calm, unlucky, concurrency=1)
    first, second = await slots.play(0, 1)
    assert (first.attempt.tries, second.attempt.tries) == (2, 0)
    assert [first.reward, second.reward] == [1.0, 1.0]
    tokens = [*(row for row, _ in played), first.rows[0].tokens.tolist()]
    assert tokens[0] != tokens[1] != tokens[2]
    assert slots.breaker.lost == {"agent_error": 2}


@pytest.mark.parametrize("attempts", [1, 4])
async def test_attempts_are_bounded(autojump_clock, attempts) -> None:
    slots = Slots(partial(Fails, "reset", broken), max_attempts=attempts)
    await slots.play(0)
    assert slots.breaker.lost.total() == slots.slots.restarts == attempts


@pytest.mark.parametrize("nested", [False, True])
async def test_a_conversation_that_is_over_is_a_normal_end(autojump_clock, nested) -> None:
    async def talks_on(talk: Any, world: Any) -> None:
        talk.user(await world.reset())
        while True:
            await talk.generate()
            talk.user("b")

    async def nests(talk: Any, world: Any) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            nursery.start_soon(talks_on, talk, world)

    (episode,) = await Slots(calm, nests if nested else talks_on, {}, max_turns=3).play(0)
    assert (episode.status, episode.turns, episode.reward) == ("max_turns", 3, 1.0)
    assert len(episode.rows) == 1


async def test_a_group_that_holds_more_than_the_end_is_judged_by_its_leaves(autojump_clock) -> None:
    async def both(talk: Any, world: Any) -> None:
        raise ExceptionGroup("both", [ConversationOver(""), ExceptionGroup("deeper", [ValueError("env 42")])])

    (lost,) = await Slots(calm, both).play(0)
    assert (lost.kind, lost.cause) == ("agent_error", "ValueError: env 42")


@pytest.mark.parametrize("where", ["agent", "environment", "group"])
async def test_an_interrupt_passes_through(autojump_clock, where) -> None:
    async def stop() -> None:
        raise KeyboardInterrupt

    async def agent(talk: Any, world: Any) -> None:
        if where == "agent":
            await stop()
        if where == "group":
            raise BaseExceptionGroup("mixed", [ValueError(), KeyboardInterrupt()])
        await world.reset()

    slots = Slots(partial(Fails, "reset", stop), agent)
    with pytest.raises(BaseExceptionGroup) as caught:
        await slots.play(0)
    assert caught.value.subgroup(KeyboardInterrupt) is not None
    assert slots.breaker.lost == {}


async def test_cancellation_from_outside_passes_through(autojump_clock) -> None:
    slots = Slots(partial(Fails, "step", trio.sleep_forever), swallow_all)
    with trio.move_on_after(5.0) as scope:
        await slots.play(0)
    assert scope.cancelled_caught
    assert slots.breaker.lost == {}


def judge(value: Any) -> Callable[..., Any]:
    async def given(task: Task, messages: Any, text: str) -> Any:
        return await value() if callable(value) else value

    return given


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (broken, "reward function 'judge' raised ValueError for task 't': env 42"),
        (trio.sleep_forever, "environment.reward_timeout = 60 s"),
        (float("inf"), "'judge' returned inf"),
        ("1", "'judge' returned '1' (str)"),
        (1.7e308, "'the sum of all rewards' returned inf"),
    ],
)
async def test_a_reward_that_is_none_loses_the_attempt(autojump_clock, value, cause) -> None:
    class Rich(Fails):
        async def reward(self) -> float:
            return 1.7e308

    (lost,) = await Slots(partial(Rich, "", broken), rewards={"judge": judge(value)}, max_attempts=1).play(0)
    assert lost.kind == "reward_error"
    assert cause in lost.cause


@pytest.mark.parametrize("value", [None, float("nan")])
async def test_a_function_that_cannot_judge_leaves_the_episode_without_a_reward(autojump_clock, value) -> None:
    (episode,) = await Slots(calm, rewards={"judge": judge(value), "other": judge(0.5)}).play(0)
    assert episode.reward is None
    assert episode.metrics == {"rewards/other": 0.5}


async def test_environment_and_functions_are_added_up(autojump_clock) -> None:
    seen: list[Any] = []

    async def look(task: Task, messages: tuple[Message, ...], text: str) -> Any:
        seen.append((task.id, messages[-1], text))
        return np.float32(0.5)

    (episode,) = await Slots(calm, rewards={"look": look, "flag": judge(True)}).play(0)
    assert episode.reward == 2.5
    said = episode.messages[1].content
    assert seen == [("t", Message("user", "b"), said)]
    assert episode.digest() == episode.sampled_digest
    assert episode.timings.keys() == {"total", "generate", "environment"}


async def test_eight_rollouts_at_once_share_nothing() -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = 0
            self.tools = (self.inc,)

        def reset(self, task: Task) -> str:
            task.payload["seen"].append("reset")
            self.count = 0
            return "a"

        def inc(self) -> int:
            """One more."""
            count = self.count
            threading.Event().wait(0.002)  # time for another thread to step in between
            self.count = count + 1
            return self.count

        def step(self, action: str) -> StepResult:
            return StepResult("", done=True)

    async def thrice(talk: Any, world: Any) -> None:
        talk.user(await world.reset())
        await talk.generate()
        for _ in range(3):
            talk.user(chr(ord("a") + int((await world.call("inc", {})).text)))
        talk.metrics["seen"] = float(len(world.task.payload["seen"]))

    task = Task("t", {"seen": []})
    episodes = await Slots(Counter, thrice, concurrency=8, isolation="thread").play(*range(8), task=task)
    assert ["".join(message.content for message in each.messages[2:]) for each in episodes] == ["bcd"] * 8
    assert [each.metrics["seen"] for each in episodes] == [1.0] * 8
    assert task.payload == {"seen": []}


class Once:
    """Raises what `errors` holds for this life, life by life, and then works."""

    def __init__(self, errors: list[BaseException]) -> None:
        self._error = errors.pop(0) if errors else None

    async def reset(self, task: Task) -> str:
        if self._error is not None:
            raise self._error
        return "a"

    async def step(self, action: str) -> StepResult:
        return StepResult("b", reward=1.0, done=True)


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (EnvironmentFailure("env_error", "no such map", retry=False), "env_error"),
        (EnvironmentFailure("env_died", "no such map", retry=False), "env_died"),
        (EnvironmentFailure("of their own", "no such map", retry=False), "env_error"),  # kinds are counted: few
    ],
)
async def test_a_failure_that_says_so_is_not_tried_again(autojump_clock, failure, kind) -> None:
    slots = Slots(partial(Once, [failure]))
    (lost,) = await slots.play(0)
    assert (lost.kind, lost.cause, lost.attempt.tries) == (kind, "no such map", 0)
    assert slots.breaker.lost == {kind: 1}


async def test_a_tool_may_say_so_too(autojump_clock) -> None:
    class World(Once):
        @property
        def tools(self) -> Any:
            return (self.look,)

        async def look(self) -> str:
            """Look."""
            raise EnvironmentFailure("env_error", "no such map", retry=False)

    async def looks(talk: Any, world: Any) -> None:
        await world.call("look", {})

    slots = Slots(partial(World, []), looks)
    (lost,) = await slots.play(0)
    assert lost.attempt.tries == 0


async def test_a_failure_that_passes_costs_tries_and_no_episode(autojump_clock) -> None:
    slots = Slots(partial(Once, [ValueError("env 42"), ValueError("env 42")]))
    (episode,) = await slots.play(0)
    assert (episode.reward, episode.attempt.tries) == (1.0, 2)
    assert slots.breaker.lost == {"env_error": 2}


class Panic(BaseException):
    """As the Rust extensions raise it."""


class Unprintable(Exception):
    def __str__(self) -> str:
        raise AttributeError


@dataclass
class ApiError(Exception):  # which has no hash
    code: int

    def __str__(self) -> str:
        return str(self.code)


def its_own_cause() -> Exception:
    error = ValueError("env 42")
    error.__cause__ = error
    return error


@pytest.mark.parametrize("where", ["agent", "environment", "reward"])
@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (Panic("at src/lib.rs:1"), "Panic: at src/lib.rs:1"),
        (asyncio.CancelledError("stray"), "CancelledError: stray"),
        (Unprintable(), "Unprintable: its text cannot be shown"),
        (BaseExceptionGroup("both", [Panic("at src/lib.rs:1"), ValueError("env 42")]), "Panic: at src/lib.rs:1"),
        (its_own_cause(), "env 42"),
        (SystemExit(2), "SystemExit: 2"),
        (GeneratorExit("stray"), "GeneratorExit: stray"),
        (ApiError(503), "503"),
    ],
)
async def test_whatever_user_code_raises_costs_an_attempt_and_not_the_run(autojump_clock, where, error, cause) -> None:
    async def fail(*_: Any) -> None:
        raise error

    given = {
        "agent": {"environment": calm, "agent": fail},
        "environment": {"environment": partial(Fails, "step", fail)},
        "reward": {"environment": calm, "rewards": {"judge": fail}},
    }[where]
    (lost,) = await Slots(**given, max_attempts=1).play(0)
    assert lost.kind == {"agent": "agent_error", "environment": "env_error", "reward": "reward_error"}[where]
    if where != "reward" or not isinstance(error, BaseExceptionGroup):  # a reward function's error is shown whole
        assert cause in lost.cause


async def test_a_group_that_also_holds_a_cancellation_does_not_swallow_it(autojump_clock) -> None:
    async def both(talk: Any, world: Any) -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled as cancelled:
            raise BaseExceptionGroup("both", [ValueError("env 42"), cancelled]) from None

    slots = Slots(calm, both)
    with trio.move_on_after(5.0) as scope:
        await slots.play(0)
    assert scope.cancelled_caught
    assert slots.breaker.lost == {}


# Agents that do not end --------------------------------------------------------------------------------------------


async def shields(talk: Any, world: Any) -> None:
    with trio.CancelScope(shield=True):
        await trio.sleep(200.0)


async def swallows(talk: Any, world: Any) -> None:
    end = trio.current_time() + 200.0
    while trio.current_time() < end:
        with contextlib.suppress(BaseException):
            await trio.sleep(1.0)
        with trio.CancelScope(shield=True):  # virtual time stands still while anything runs
            await trio.sleep(1.0)


@pytest.mark.parametrize("hangs", [shields, swallows])
async def test_an_agent_that_does_not_end_loses_its_attempt_and_the_slot_goes_on(autojump_clock, hangs) -> None:
    left = [1]

    async def agent(talk: Any, world: Any) -> None:
        await (hangs if left and left.pop() else model_agent)(talk, world)

    slots = Slots(calm, agent, concurrency=1, episode_timeout=50.0)
    first, second = await slots.play(0, 1)
    assert trio.current_time() < 70.0
    assert [first.reward, first.attempt.tries, second.reward] == [1.0, 1, 1.0]
    assert slots.breaker.lost == {"agent_error": 1}
    left = "the agent did not end when it was cancelled 10 s ago and is left behind: the agent of task 't', at "
    assert f"{left}{hangs.__name__} (" in slots.notes[0]


async def test_an_agent_that_was_left_behind_does_not_play_in_the_next_attempt(autojump_clock) -> None:
    left, refused = [1], []

    async def stays(world: Any) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(70.0)  # meanwhile the next attempt has begun
            try:
                await world.step("mine as well")
            except EnvironmentFailure as failure:
                refused.append(str(failure))

    async def agent(talk: Any, world: Any) -> None:
        await world.reset()
        if left and left.pop():
            await stays(world)
        await trio.sleep(20.0)
        await world.step("mine")

    class Stepwise:
        async def reset(self, task: Task) -> str:
            return "a"

        async def step(self, action: str) -> StepResult:
            return StepResult("b", reward=1.0)

    slots = Slots(Stepwise, agent, concurrency=1, episode_timeout=50.0)
    (episode,) = await slots.play(0)
    assert (episode.attempt.tries, episode.reward) == (1, 1.0)
    assert refused == ["step was called in an attempt that is over"]
    assert await stuck(10.0) == []


async def test_a_call_that_hangs_is_left_behind_once_also_when_its_slots_begin_anew(autojump_clock) -> None:
    release = trio.Event()

    async def hang() -> None:
        with trio.CancelScope(shield=True):
            await release.wait()

    fails = ["step"]
    slots = Slots(lambda: Fails(fails.pop() if fails else "", hang), lasting, deadlines={"step_timeout": 100.0})
    with trio.move_on_after(5.0):
        await slots.play(0)
    abandoned = [slots.slots._threads.abandoned]
    (episode,) = await slots.play(1)  # over the deadline of the call that hangs
    assert episode.reward == 1.0
    abandoned.append(slots.slots._threads.abandoned)
    release.set()
    assert await stuck(10.0) == []
    assert [*abandoned, slots.slots._threads.abandoned] == [1, 1, 0]


async def lasting(talk: Any, world: Any) -> None:
    await model_agent(talk, world)
    await trio.sleep(200.0)


async def test_calls_that_only_their_process_has_stopped_are_not_left_behind(autojump_clock) -> None:
    left = 8

    class Slow(Fails):
        async def step(self, action: str) -> StepResult:
            nonlocal left
            if left:
                left -= 1
                await trio.sleep(1000.0)  # not over when the process goes on
            return await super().step(action)

    slots = Slots(partial(Slow, "", broken), concurrency=8, deadlines={"max_abandoned_threads": 0})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(slots.play, *range(8)))
        await trio.sleep(5.0)
        autojump_clock.jump(500.0)  # Ctrl-Z, a debugger
    assert slots.notes
    assert not any("goes on although it was cancelled" in note for note in slots.notes)


async def leaves_a_nursery(keep: contextlib.AsyncExitStack) -> None:
    nursery = await keep.enter_async_context(trio.open_nursery())
    nursery.start_soon(broken)


async def leaves_a_scope(keep: contextlib.AsyncExitStack) -> None:
    keep.enter_context(trio.CancelScope())


@pytest.mark.parametrize("leaves", [leaves_a_nursery, leaves_a_scope])
@pytest.mark.parametrize("where", ["reset", "step", "agent"])
async def test_a_nursery_or_scope_that_is_left_open_costs_an_attempt(autojump_clock, leaves, where) -> None:
    left, keep = [1], contextlib.AsyncExitStack()

    async def once() -> None:
        if left and left.pop():
            await leaves(keep)

    async def agent(talk: Any, world: Any) -> None:
        if where == "agent":
            await once()
        await model_agent(talk, world)

    slots = Slots(partial(Fails, where, once), agent)
    (episode,) = await slots.play(0)
    assert (episode.reward, episode.attempt.tries) == (1.0, 1)
    if where == "agent":
        assert "agent_error: RuntimeError: Cancel scope stack corrupted" in slots.notes[0]
    else:
        assert f"env_error: {where} has left a nursery or a cancel scope open" in slots.notes[0]


async def test_environments_rewards_and_agents_that_hang_for_good_are_left_behind_and_bounded(autojump_clock) -> None:
    release = trio.Event()

    async def hang(*_: Any) -> None:
        while not release.is_set():
            with contextlib.suppress(BaseException):
                await release.wait()
            with trio.CancelScope(shield=True):
                await trio.sleep(1.0)

    deadlines = {"step_timeout": 5.0, "reward_timeout": 5.0, "max_abandoned_threads": 1}
    given = {"concurrency": 1, "max_attempts": 1, "deadlines": deadlines, "episode_timeout": 50.0}
    (lost,) = await Slots(partial(Fails, "step", hang), **given).play(0)
    assert lost.kind == "env_timeout"
    assert "step took longer than environment.step_timeout = 5 s, and it goes on" in lost.cause
    (lost,) = await Slots(calm, rewards={"judge": hang}, **given).play(0)
    assert (lost.kind, "environment.reward_timeout = 5 s" in lost.cause) == ("reward_error", True)
    for part in ({"environment": partial(Fails, "step", hang)}, {"environment": calm, "agent": hang}):
        with pytest.raises(ExceptionGroup) as caught:
            await Slots(**part, **given).play(*range(4))
        assert "2 calls of user code outlived their deadlines" in str(leaf(caught.value))
    assert await stuck(1.0) != []
    release.set()
    assert await stuck(10.0) == []


async def test_the_end_of_a_run_waits_for_nothing_that_hangs(autojump_clock) -> None:
    release = trio.Event()

    async def hang() -> None:
        with trio.CancelScope(shield=True):
            await release.wait()

    class Closes(Fails):
        async def close(self) -> None:
            await hang()

    slots = Slots(partial(Closes, "", broken), deadlines={"close_timeout": 5.0})
    (episode,) = await slots.play(0)
    assert episode.reward == 1.0
    assert trio.current_time() < 12.0
    assert "an environment, at" in slots.notes[-1]
    assert all("hang (test_episode.py:" in each for each in await stuck(1.0))
    release.set()
    assert await stuck(10.0) == []


async def test_a_task_that_cannot_be_copied_loses_its_attempt(autojump_clock) -> None:
    slots = Slots(calm)
    (lost,) = await slots.play(0, task=Task("t", {"lock": threading.Lock()}))
    assert (lost.kind, lost.attempt.tries) == ("env_error", 0)
    assert "task 't' cannot be copied" in lost.cause
    assert "cannot pickle '_thread.lock'" in lost.cause


async def test_an_agent_that_takes_its_time_to_end_is_not_named(autojump_clock) -> None:
    async def tidies(talk: Any, world: Any) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(5.0, shield=True):
                await trio.sleep_forever()

    slots = Slots(calm, tidies, max_attempts=1, episode_timeout=50.0)
    (lost,) = await slots.play(0)
    assert lost.kind == "episode_timeout"
    assert len(slots.notes) == 1
    assert trio.current_time() == 55.0


async def test_an_agent_that_swallows_its_cancellation_and_returns_gives_no_episode(autojump_clock) -> None:
    async def returns(talk: Any, world: Any) -> None:
        await model_agent(talk, world)
        with contextlib.suppress(BaseException):
            await trio.sleep_forever()

    (lost,) = await Slots(calm, returns, max_attempts=1, episode_timeout=50.0).play(0)
    assert lost.kind == "episode_timeout"


async def test_tasks_of_an_agent_end_with_it(autojump_clock) -> None:
    ended: list[str] = []

    async def stays() -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append("child")

    async def spawns(talk: Any, world: Any) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stays)
            await world.reset()

    (lost,) = await Slots(partial(Fails, "reset", broken), spawns, max_attempts=1).play(0)
    assert lost.cause == "reset: ValueError: env 42"
    assert ended == ["child"]


# Environments that are not one's own -------------------------------------------------------------------------------


@pytest.mark.parametrize("make_async", [False, True])
@pytest.mark.parametrize("isolation", ["inline", "thread"])
async def test_an_environment_that_is_handed_out_twice_ends_the_run_by_name(make_async, isolation) -> None:
    only = Once([])

    async def shared() -> Once:
        return only

    with pytest.raises(ExceptionGroup) as caught:
        await Slots(shared if make_async else lambda: only, isolation=isolation).play(0, 1)
    assert isinstance(refusal := leaf(caught.value), RunError)
    assert "the same Once object twice" in str(refusal)
    assert "thread_safe = True" in str(refusal)


async def test_a_failed_environment_is_not_handed_out_again(autojump_clock) -> None:
    only = Once([ValueError("env 42")])
    with pytest.raises(ExceptionGroup) as caught:
        await Slots(lambda: only, concurrency=1).play(0)
    assert "the same Once object twice" in str(leaf(caught.value))


async def test_a_class_that_can_be_shared_says_so(autojump_clock) -> None:
    class Shared(Once):
        thread_safe = True

    only = Shared([])
    assert [episode.reward for episode in await Slots(lambda: only).play(0, 1)] == [1.0, 1.0]


# asyncio -----------------------------------------------------------------------------------------------------------


class OnAsyncio:
    """Written for asyncio, every part of it."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self.tools = (self.inc,)
        self._count = 0

    async def reset(self, task: Task) -> str:
        # Not `gather`: without a loop it makes one that nobody closes.
        async with asyncio.TaskGroup() as both:
            both.create_task(asyncio.sleep(0))
            both.create_task(asyncio.sleep(0.001))
        return "a"

    async def inc(self) -> int:
        """One more."""
        async with self._lock:
            count = self._count
            await asyncio.sleep(0.001)
            self._count = count + 1
        return self._count

    async def step(self, action: str) -> StepResult:
        await asyncio.wait_for(self.inc(), 10.0)
        return StepResult("b", reward=float(self._count), done=True)

    async def close(self) -> None:
        await asyncio.sleep(0)


async def judges_on_asyncio(task: Task, messages: Any, text: str) -> float:
    await asyncio.sleep(0.001)
    return 0.5


async def test_asyncio_environments_and_rewards_run_on_a_loop_of_their_own() -> None:
    async def counts(talk: Any, world: Any) -> None:
        talk.user(await world.reset())
        turn = await talk.generate()
        await world.call("inc", {})
        await world.step(turn.text)

    slots = Slots(
        OnAsyncio,
        counts,
        {"judge": judges_on_asyncio},
        concurrency=8,
        isolation="thread",
        deadlines={"async_library": "asyncio"},
    )
    episodes = await slots.play(*range(8))
    assert [episode.reward for episode in episodes] == [2.5] * 8
    assert not [thread.name for thread in threading.enumerate() if "asyncio" in thread.name]


@pytest.mark.parametrize("part", ["environment", "reward"])
async def test_asyncio_code_is_told_the_key_it_needs(autojump_clock, part) -> None:
    given = {"environment": OnAsyncio} if part == "environment" else {"rewards": {"judge": judges_on_asyncio}}
    (lost,) = await Slots(**{"environment": calm, **given}, max_attempts=1).play(0)
    assert 'needs environment.async_library = "asyncio"' in lost.cause


async def test_an_asyncio_environment_that_hangs_or_cancels_itself_costs_attempts() -> None:
    class Hangs(OnAsyncio):
        async def reset(self, task: Task) -> str:
            await asyncio.Event().wait()
            return "a"

        async def step(self, action: str) -> StepResult:
            raise asyncio.CancelledError("stray")

    async def steps(talk: Any, world: Any) -> None:
        await world.step("a")

    deadlines = {"async_library": "asyncio", "reset_timeout": 0.01}
    slots = Slots(Hangs, isolation="thread", deadlines=deadlines, max_attempts=1)
    (lost,) = await slots.play(0)
    assert lost.kind == "env_timeout"
    assert "environment.reset_timeout = 0.01 s" in lost.cause
    (lost,) = await Slots(Hangs, steps, isolation="thread", deadlines=deadlines, max_attempts=1).play(0)
    assert (lost.kind, lost.cause) == ("env_error", "step: RuntimeError: CancelledError: stray")


# Whole runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["shrink", "drop"])
async def test_one_member_that_fails_leaves_its_siblings_alone(autojump_clock, play, letters, policy) -> None:
    fates = [1.0, None, 0.0, 1.0]

    class Fated(letters):
        def __init__(self) -> None:
            self.score: float | None = fates.pop(0) if fates else 0.5

        async def step(self, action: str) -> Any:
            if self.score is None:
                raise ValueError("env 42")
            return await super().step(action)

        def reward(self) -> float:
            assert self.score is not None
            return self.score

    played = await play(
        make_environment=Fated,
        rollout={
            "num_generations": 4,
            "max_concurrency": 4,
            "max_attempts": 1,
            "lost_members": policy,
            "quarantine_after": 0,
        },
        train={"max_steps": 1, "groups_per_step": 1, "scale_rewards": "none"},
    )()
    ((_, group),) = played.groups
    rewards = sorted(episode.reward for episode in group.episodes)
    if policy == "shrink":
        assert (group.lost, rewards) == (1, [0.0, 1.0, 1.0])
        assert sorted(group.advantages) == pytest.approx([-2 / 3, 1 / 3, 1 / 3])
    else:
        assert (group.draw, group.lost, len(rewards)) == (1, 0, 4)  # another task in its place
        assert played.total("grouper/dropped/lost") == 1
    assert played.total("env/failures/env_error") == 1
    log = (played.directory / "log.txt").read_text()
    assert "ValueError: env 42" in log
    assert log.count("Traceback") == 1


@pytest.mark.parametrize("attempts", [1, 4])
async def test_a_task_that_always_fails_is_tried_so_often_and_then_replaced(
    autojump_clock, play, letters, attempts
) -> None:
    tried: list[str] = []

    class Picky(letters):
        async def reset(self, task: Task) -> str:
            tried.append(task.id)
            if task.id == "1":
                raise ValueError("env 42")
            return await super().reset(task)

    played = await play(make_environment=Picky, rollout={"max_attempts": attempts})()
    assert tried.count("1") == 2 * attempts
    assert played.total("env/failures/env_error") == 2 * attempts
    assert played.total("grouper/dropped/lost") == 1
    assert played.learner.step == 4
    assert "1" not in {episode.attempt.task.id for _, group in played.groups for episode in group.episodes}
    assert sum(len(group.episodes) for _, group in played.groups) == 16
    # Every other member was played once: a try is no member of its own.
    assert len(tried) - 2 * attempts == 16


async def test_a_run_in_which_everything_fails_ends_after_so_many_tries(autojump_clock, play, letters) -> None:
    tried: list[str] = []

    class Broken(letters):
        async def reset(self, task: Task) -> str:
            tried.append(task.id)
            raise ValueError("env 42")

    with pytest.raises(HopelessRun, match="First cause of env_error: reset: ValueError: env 42"):
        await play(make_environment=Broken, rollout={"max_consecutive_lost": 10})()
    assert 10 <= len(tried) <= 10 + 8  # one more per slot may be on its way


# The breaker ---------------------------------------------------------------------------------------------------


async def test_a_hopeless_run_ends_with_the_class_and_the_first_cause(autojump_clock) -> None:
    slots = Slots(partial(Fails, "reset", broken), breaker=Breaker(5, 1.0))
    with pytest.raises(ExceptionGroup) as caught:
        await slots.play(*range(8))
    assert isinstance(hopeless := leaf(caught.value), HopelessRun)
    assert "5 attempts in a row" in str(hopeless)
    assert "env_error 5. First cause of env_error: reset: ValueError: env 42" in str(hopeless)


def test_the_breaker_forgives_what_is_followed_by_success() -> None:
    breaker = Breaker(3, 1.0)
    for _ in range(5):
        breaker.lose("env_error", "x")
        breaker.lose("env_timeout", "y")
        breaker.survived()
    assert breaker.lost == {"env_error": 5, "env_timeout": 5}


def test_the_breaker_ends_a_run_that_loses_too_large_a_share() -> None:
    breaker = Breaker(1000, 0.5)
    for _ in range(BREAKER_WINDOW // 2):
        breaker.lose("env_error", "first")
        breaker.survived()
    breaker.lose("env_timeout", "later")  # in place of the oldest, which was lost too
    with pytest.raises(HopelessRun, match=r"50% of the last 256 attempts were lost; rollout.max_lost_fraction .* 50%"):
        breaker.lose("env_timeout", "later")
