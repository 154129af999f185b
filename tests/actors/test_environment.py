"""One environment under its actor: every way in which user code can fail, and what the attempt sees of it: nothing."""

import threading
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
import trio

from trouper.actors.alarms import Alarms
from trouper.actors.backoff import Backoff
from trouper.actors.config import Environment as Deadlines
from trouper.actors.environment import EnvironmentActor
from trouper.actors.threads import Threads
from trouper.channels import Task
from trouper.envs import StepResult

CALLS = ("create", "reset", "step", "tool", "reward")


class Fickle:
    """Does what `behave` does in the call of a name; otherwise two steps and a reward."""

    def __init__(self, behave: Callable[[str], Any]) -> None:
        self._behave = behave
        self.tools = (self.count,)
        self._count = 0

    async def reset(self, task: Task) -> str:
        await self._behave("reset")
        self._steps = 0
        return "go"

    async def step(self, action: str) -> StepResult:
        await self._behave("step")
        self._steps += 1
        return StepResult(action, reward=0.25, done=self._steps == 2, metrics={"steps": self._steps})

    async def count(self, by: int = 1) -> int:
        """Count."""
        await self._behave("tool")
        self._count += by
        return self._count

    async def reward(self) -> float:
        await self._behave("reward")
        return 1.0

    async def close(self) -> None:
        await self._behave("close")


class Bench:
    """An environment's actor and a way to play attempts on it."""

    def __init__(self, make: Callable[[], Any], isolation: str = "inline", **limits: Any) -> None:
        deadlines = Deadlines(isolation=isolation, **limits)  # type: ignore[arg-type]
        self.notes: list[str] = []
        self.alarms = Alarms()
        self.threads = Threads(2, deadlines.max_abandoned_threads, deadlines.isolation)
        backoff = Backoff("0", first=deadlines.restart_backoff, longest=deadlines.restart_backoff_max)
        self.world = EnvironmentActor(make, deadlines, self.threads, self.alarms, backoff, self.notes.append)
        self.seen: list[Exception] = []

    async def attempt(
        self, agent: Callable[[Any], Any] | None = None, task: Task | None = None, timeout: float = 1e5
    ) -> Any:
        """What the agent returned, or None when the attempt was cancelled from outside."""
        with trio.move_on_after(timeout) as scope:
            self.world.begin(task or Task("t"), 7, scope)
            try:
                await self.world.prepare()
                return await (agent or whole)(self.world)
            except Exception as error:
                self.seen.append(error)
        return None


async def whole(world: Any) -> float | None:
    await world.reset()
    while not world.done:
        await world.step("x")
    await world.call("count", {})
    score: float | None = await world.score()
    return score


@pytest.fixture
async def bench(nursery):
    def make(*args: Any, **limits: Any) -> Bench:
        made = Bench(*args, **limits)
        nursery.start_soon(made.alarms.run)
        nursery.start_soon(made.world.serve)
        return made

    return make


def once(where: str, how: Callable[[], Any]) -> Callable[[], Any]:
    """Makes environments of which the first fails in one call."""
    left = [1]

    async def behave(call: str) -> None:
        if call == where and left:
            left.clear()
            await how()

    async def make() -> Fickle:
        await behave("create")
        return Fickle(behave)

    return make


async def broken() -> None:
    raise OSError("env 42")


async def grouped() -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        nursery.start_soon(broken)


@pytest.mark.parametrize("where", CALLS)
@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        (broken, "env_error", "OSError: env 42"),
        (grouped, "env_error", "OSError: env 42"),
        (trio.sleep_forever, "env_timeout", "took longer than environment."),
    ],
    ids=["raises", "raises a group", "hangs"],
)
async def test_a_failure_ends_the_attempt_from_outside_and_the_next_one_has_a_new_object(
    autojump_clock, bench, where, how, kind, words
) -> None:
    made = bench(once(where, how))
    assert await made.attempt() is None
    assert made.seen == []  # the agent was cancelled, not told
    assert made.world.failure.kind == kind
    assert words in str(made.world.failure)
    assert made.world.restarts == 1
    assert await made.attempt() == 1.0
    assert made.world.failure is None


@pytest.mark.parametrize("where", CALLS)
async def test_a_plain_call_that_hangs_is_left_in_its_thread(bench, where) -> None:
    release, left = threading.Event(), [1]

    def behave(call: str) -> None:
        if call == where and left:
            left.clear()
            release.wait()

    class Plain:
        def __init__(self) -> None:
            behave("create")
            self.tools = (self.count,)

        def reset(self, task: Task) -> str:
            behave("reset")
            return "go"

        def step(self, action: str) -> StepResult:
            behave("step")
            return StepResult("", done=True)

        def count(self) -> int:
            behave("tool")
            return 1

        def reward(self) -> float:
            behave("reward")
            return 1.0

    limit = f"{'step' if where == 'tool' else where}_timeout"
    made = bench(Plain, isolation="thread", restart_backoff=0.0, **{limit: 0.2})
    with trio.fail_after(20):
        assert await made.attempt() is None
        assert (made.world.failure.kind, made.threads.abandoned) == ("env_timeout", 1)
        assert await made.attempt() == 1.0
        release.set()
        while made.threads.abandoned:  # a thread changes it, and sets no event
            await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("how", [broken, trio.sleep_forever])
async def test_a_close_that_fails_is_noted_and_costs_nothing_else(autojump_clock, how) -> None:
    made = Bench(once("close", how), close_timeout=2.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.alarms.run)
        nursery.start_soon(made.world.serve)
        assert await made.attempt() == 1.0
        nursery.cancel_scope.cancel()
    assert trio.current_time() <= 2.0
    assert len(made.notes) == 1
    assert "Fickle.close failed" in made.notes[0]


async def test_restarts_wait_longer_and_longer_until_an_object_has_answered(autojump_clock, bench) -> None:
    made_at, fails = [], [1, 1, 1, 1, 0, 1, 1, 1]

    async def behave(call: str) -> None:
        if call == "reset" and fails.pop(0):
            raise OSError

    def make() -> Fickle:
        made_at.append(trio.current_time())
        return Fickle(behave)

    made = bench(make, restart_backoff=1.0, restart_backoff_max=4.0)
    while fails:
        await made.attempt()
    waits = np.diff(made_at)
    most = [1.0, 2.0, 4.0, 4.0, 0.0, 1.0]  # the fifth object answered: the one after it comes at once
    assert len(waits) == len(most)
    for wait, limit in zip(waits, most, strict=True):
        assert limit / 2 <= wait <= limit


async def test_a_call_of_an_attempt_that_timed_out_does_not_touch_the_next(autojump_clock, bench) -> None:
    async def stubborn() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise OSError("raised while it was cancelled")

    made = bench(once("step", stubborn))
    assert await made.attempt(timeout=5.0) is None
    assert made.world.failure is None  # the attempt ended by its own limit
    assert await made.attempt() == 1.0
    assert made.world.restarts == 1


async def test_an_agent_that_leaves_a_call_loses_its_attempt(autojump_clock, bench) -> None:
    async def impatient(world: Any) -> str:
        await world.reset()
        with trio.move_on_after(1.0):
            await world.step("x")
        await world.step("y")
        return "went on with a world that nobody knows"

    made = bench(once("step", trio.sleep_forever))
    assert await made.attempt(impatient) is None
    assert made.world.failure.kind == "agent_error"
    assert "left step before it was answered" in str(made.world.failure)


async def test_a_call_that_a_failed_attempt_left_behind_costs_the_next_one_nothing(autojump_clock, bench) -> None:
    async def leaves(world: Any) -> None:
        await world.reset()
        with trio.move_on_after(1.0):
            await world.step("x")
        raise LookupError("and then it fails")

    made = bench(once("step", trio.sleep_forever))
    assert await made.attempt(leaves) is None
    assert await made.attempt() == 1.0
    assert made.world.failure is None


async def test_calls_of_one_attempt_run_one_at_a_time(autojump_clock, bench) -> None:
    async def slowly(call: str) -> None:
        await trio.sleep(1.0)

    async def at_once(world: Any) -> list[str]:
        counts: list[str] = []

        async def call() -> None:
            counts.append((await world.call("count", {})).text)

        await world.reset()
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(call)
        return sorted(counts)

    assert await bench(lambda: Fickle(slowly)).attempt(at_once) == ["1", "2", "3"]


async def test_each_attempt_has_a_payload_of_its_own(autojump_clock, bench) -> None:
    class Greedy:
        def reset(self, task: Task) -> str:
            task.payload["list"].append(1)
            return str(task.payload["list"])

        def step(self, action: str) -> StepResult:
            return StepResult("", done=True)

    async def first(world: Any) -> str:
        text: str = await world.reset()
        return text

    task = Task("t", {"list": []})
    made = bench(Greedy)
    assert [await made.attempt(first, task) for _ in range(3)] == ["[1]"] * 3
    assert task.payload == {"list": []}


@pytest.mark.parametrize("seed", range(20))
async def test_every_call_has_its_whole_limit_and_no_more(autojump_clock, bench, seed) -> None:
    draw = Random(seed)
    limits = {"reset": 12.0, "step": 7.0, "tool": 7.0}
    took: list[tuple[str, float]] = []

    async def slowly(call: str) -> None:
        if call in limits:
            took.append((call, draw.choice([0.0, 1.0, 3.0, 6.5, 6.5, 11.0])))
            await trio.sleep(took[-1][1])

    async def forever(world: Any) -> None:
        await world.reset()
        while True:
            await trio.sleep(draw.choice([0.0, 2.0, 20.0]))
            began.append(trio.current_time())
            await (world.step("x") if draw.random() < 0.5 else world.call("count", {}))

    made, began = bench(lambda: Fickle(slowly), reset_timeout=12.0, step_timeout=7.0), []
    assert await made.attempt(forever) is None
    assert made.world.failure.kind == "env_timeout"
    *in_time, (call, too_long) = took
    assert too_long > limits[call]
    assert all(seconds <= limits[call] for call, seconds in in_time)
    assert trio.current_time() == began[-1] + limits[call]


STEP = StepResult("o", 1.0)


@pytest.mark.parametrize(
    ("call", "value", "words"),
    [
        ("reset", b"text", r"Odd: observation at reset is b'text' \(bytes\)"),
        ("reset", ("text", {}), "observation at reset .* return the text alone"),
        ("step", ("o", 1.0, True, {}), "return value at step 1"),
        ("step", msgspec.structs.replace(STEP, reward=float("nan")), "reward at step 1 is nan"),
        ("step", msgspec.structs.replace(STEP, reward=None), "reward at step 1 is None"),
        ("step", msgspec.structs.replace(STEP, done=1), "done at step 1"),
        ("step", msgspec.structs.replace(STEP, observation={}), "observation at step 1"),
        ("reward", float("inf"), r"reward\(\) at step 1 is inf"),
        ("reward", "1", r"reward\(\) at step 1 is '1'"),
    ],
)
async def test_a_value_that_is_no_answer_is_a_failure_that_names_it(autojump_clock, bench, call, value, words) -> None:
    class Odd:
        def answer(self, name: str, usual: Any) -> Any:
            return value if name == call else usual

        def reset(self, task: Task) -> Any:
            return self.answer("reset", "go")

        def step(self, action: str) -> Any:
            return self.answer("step", StepResult("", done=True))

        def reward(self) -> Any:
            return self.answer("reward", 1.0)

    made = bench(Odd)
    assert await made.attempt(whole) is None
    assert made.world.failure.kind == "env_error"
    with pytest.raises(Exception, match=words):
        raise made.world.failure


async def test_without_a_final_score_the_steps_are_summed(autojump_clock, bench) -> None:
    class Stepwise:
        def __init__(self, rewards: list[float]) -> None:
            self.rewards = rewards

        def reset(self, task: Task) -> str:
            return "go"

        def step(self, action: str) -> StepResult:
            return StepResult("", reward=self.rewards.pop(0), done=not self.rewards)

    assert await bench(lambda: Stepwise([0.25, np.float32(0.5), np.ones(1)])).attempt() == 1.75
    huge = bench(lambda: Stepwise([1e308, 1e308]))
    assert await huge.attempt() is None
    assert "inf" in str(huge.world.failure)


async def test_tools_are_known_before_the_first_call(autojump_clock, bench) -> None:
    async def look(world: Any) -> Any:
        wrong = await world.call("add", {})
        return [tool.name for tool in world.tools], wrong.failed

    async def nothing(call: str) -> None: ...

    assert await bench(lambda: Fickle(nothing)).attempt(look) == (["count"], True)
