"""Episode slots over a real sampler: what is lost is counted, tried again, and never becomes a reward."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import trio

from trouper.actors.config import Environment as Deadlines
from trouper.actors.episode import BREAKER_WINDOW, Breaker, EpisodeRules, EpisodeSlots
from trouper.actors.sampler import Generate, Sampler
from trouper.actors.simulation import SimulatedAccelerator, SimulatedEngine, SimulatedLearner
from trouper.channels import (
    Attempt,
    Channel,
    HopelessRun,
    Lost,
    Message,
    Outcome,
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
        deadlines: dict[str, float] | None = None,
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


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["agent", "environment", "group"])
async def test_interrupts_pass_through(autojump_clock, interrupt, where) -> None:
    async def stop() -> None:
        raise interrupt

    async def agent(talk: Any, world: Any) -> None:
        if where == "agent":
            await stop()
        if where == "group":
            raise BaseExceptionGroup("mixed", [ValueError(), interrupt()])
        await world.reset()

    slots = Slots(partial(Fails, "reset", stop), agent)
    with pytest.raises(BaseExceptionGroup) as caught:
        await slots.play(0)
    assert caught.value.subgroup(interrupt) is not None
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


# The breaker ---------------------------------------------------------------------------------------------------


async def test_a_hopeless_run_ends_with_the_class_and_the_first_cause(autojump_clock) -> None:
    slots = Slots(partial(Fails, "reset", broken), breaker=Breaker(5, 1.0))
    with pytest.raises(ExceptionGroup) as caught:
        await slots.play(*range(8))
    hopeless = caught.value
    while isinstance(hopeless, ExceptionGroup):
        hopeless = hopeless.exceptions[0]
    assert isinstance(hopeless, HopelessRun)
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
