import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from trouper.actors.backoff import Backoff
from trouper.actors.supervisor import ALWAYS, NEVER, ON_ERROR, Child, Restart, Strategy, Supervisor
from trouper.actors.supervisor import log as supervisor_log
from trouper.channels import (
    CheckpointError,
    ConfigError,
    Exited,
    RestartLimit,
    RunError,
    StartError,
    TrouperError,
)

Status = Any


class Script:
    """Children that do what a test says, and a record of when they began and ended."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.exits: list[Exited] = []
        self.lives: dict[str, int] = {}

    def child(
        self,
        name: str,
        restart: Restart = ON_ERROR,
        *,
        fails: int = 0,
        after: float = 1.0,
        up_after: float = 0.0,
        runs: float = float("inf"),
        hears: bool = True,
        **options: Any,
    ) -> Child:
        """Its first `fails` lives raise `after` seconds once up; later ones run for `runs` seconds or until stopped."""

        async def run(stop: trio.Event, *, task_status: Status) -> None:
            self.lives[name] = life = self.lives.get(name, 0) + 1
            self.events.append(f"+{name}")
            try:
                await trio.sleep(up_after)
                task_status.started()
                if life <= fails:
                    await trio.sleep(after)
                    raise ValueError(f"{name} broke")
                with trio.move_on_after(runs):
                    await (stop if hears else trio.Event()).wait()
            finally:
                self.events.append(f"-{name}")

        return Child(name, run, restart, **options)

    def supervisor(self, *children: Child, **options: Any) -> Supervisor:
        return Supervisor("test", children, on_exit=self.exits.append, **options)

    @property
    def ends(self) -> list[tuple[str, str]]:
        return [(exited.name, exited.reason) for exited in self.exits]


@pytest.fixture
def script() -> Script:
    return Script()


async def until_stopped(supervisor: Supervisor, seconds: float) -> None:
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run, stop)
        await trio.sleep(seconds)
        stop.set()


async def test_a_new_life_finds_nothing_of_the_last_one_in_memory(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_log, "disabled", True)  # pytest keeps log records, and with them tracebacks

    class Cache:
        pass

    made: list[weakref.ref[Cache]] = []

    async def run(*, task_status: Status) -> None:
        gc.collect()
        assert not any(cache() for cache in made)
        cache = Cache()
        made.append(weakref.ref(cache))
        task_status.started()

        def device_call() -> None:
            try:
                raise KeyError(str(cache))
            except KeyError:
                raise ValueError("the device is gone")  # noqa: B904  # an error may come with any context

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            if len(made) < 3:
                device_call()
            nursery.cancel_scope.cancel()

    def child(stop: trio.Event, *, task_status: Status) -> Any:
        return run(task_status=task_status)

    await Supervisor("test", [Child("sampler", child, ON_ERROR)]).run()
    assert len(made) == 3


# Order ---------------------------------------------------------------------------------------------------------


async def test_starts_in_order_each_after_the_one_before_is_up_and_stops_in_reverse(
    script: Script, autojump_clock: MockClock
) -> None:
    supervisor = script.supervisor(*(script.child(name, up_after=2.0) for name in "abc"))
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        started = trio.current_time()
        await nursery.start(supervisor.run, stop)
        assert trio.current_time() - started == 6.0
        stop.set()
    assert script.events == ["+a", "+b", "+c", "-c", "-b", "-a"]
    assert script.ends == [("c", "stopped"), ("b", "stopped"), ("a", "stopped")]


async def test_ends_by_itself_when_all_children_have_returned(script: Script, autojump_clock: MockClock) -> None:
    await script.supervisor(script.child("a", runs=3.0), script.child("b", NEVER, runs=1.0)).run()
    assert script.ends == [("b", "returned"), ("a", "returned")]


async def test_without_children_it_ends_at_once(script: Script) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(script.supervisor().run)


async def test_a_child_that_returns_as_soon_as_it_is_up_does_not_hold_up_the_next(
    script: Script, autojump_clock: MockClock
) -> None:
    await script.supervisor(script.child("a", runs=0.0), script.child("b", runs=1.0)).run()
    assert script.ends == [("a", "returned"), ("b", "returned")]


def test_refuses_two_children_of_one_name(script: Script) -> None:
    with pytest.raises(ValueError, match="several children of the same name: a"):
        script.supervisor(script.child("a"), script.child("b"), script.child("a"))


# Strategies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (Strategy.ONE_FOR_ONE, ["+a", "+b", "+c", "-b", "+b"]),
        (Strategy.REST_FOR_ONE, ["+a", "+b", "+c", "-b", "-c", "+b", "+c"]),
        (Strategy.ONE_FOR_ALL, ["+a", "+b", "+c", "-b", "-c", "-a", "+a", "+b", "+c"]),
    ],
)
async def test_strategy_says_who_restarts_with_a_failed_child(
    script: Script, autojump_clock: MockClock, strategy: Strategy, expected: list[str]
) -> None:
    supervisor = script.supervisor(script.child("a"), script.child("b", fails=1), script.child("c"), strategy=strategy)
    await until_stopped(supervisor, 10.0)
    assert script.events == [*expected, "-c", "-b", "-a"]
    assert supervisor.restarts == 1


@pytest.mark.parametrize(("restart", "lives"), [(ALWAYS, 4), (ON_ERROR, 1), (NEVER, 1)])
async def test_restart_type_decides_what_a_return_means(
    script: Script, autojump_clock: MockClock, restart: Restart, lives: int
) -> None:
    child = script.child("a", restart, runs=1.0)
    supervisor = script.supervisor(child, script.child("b"), backoff=partial(Backoff, first=0.0, longest=0.0))
    await until_stopped(supervisor, 3.5)
    assert script.lives["a"] == lives


@pytest.mark.parametrize(
    ("strategy", "lives"),
    [
        (Strategy.ONE_FOR_ONE, {"early": 1, "fails": 2, "late": 1}),
        (Strategy.ONE_FOR_ALL, {"early": 2, "fails": 2, "late": 2}),
        (Strategy.REST_FOR_ONE, {"early": 1, "fails": 2, "late": 2}),
    ],
)
async def test_who_returned_begins_again_when_its_group_restarts(
    script: Script, autojump_clock: MockClock, strategy: Strategy, lives: dict[str, int]
) -> None:
    supervisor = script.supervisor(
        script.child("early", runs=0.5),
        script.child("fails", fails=1, after=2.0),
        script.child("late", runs=0.5),
        strategy=strategy,
    )
    await until_stopped(supervisor, 10.0)
    assert script.lives == lives
    assert supervisor.restarts == 1


async def test_who_may_not_restart_is_over_when_its_group_restarts(script: Script, autojump_clock: MockClock) -> None:
    def child(name: str, restart: Restart, **options: Any) -> Child:
        tell = {told: partial(script.events.append, f"{name} {told}") for told in ("ended", "restarting")}
        return script.child(name, restart, **tell, **options)

    supervisor = script.supervisor(
        child("done", NEVER, runs=0.5),
        child("once", NEVER),
        child("fails", ON_ERROR, fails=1, after=2.0),
        strategy=Strategy.ONE_FOR_ALL,
    )
    await until_stopped(supervisor, 10.0)
    first = ["+done", "+once", "+fails", "-done", "done ended", "-fails", "-once"]
    assert script.events == [*first, "once ended", "fails restarting", "+fails", "-fails"]


async def test_who_is_over_before_it_was_up_does_not_keep_the_supervisor_from_being_up(
    script: Script, autojump_clock: MockClock
) -> None:
    supervisor = script.supervisor(
        script.child("fails", fails=1, after=1.0),
        script.child("once", NEVER, up_after=5.0, grace=1.0),
        strategy=Strategy.ONE_FOR_ALL,
    )
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        with trio.fail_after(10.0):
            await nursery.start(supervisor.run, stop)
        stop.set()
    assert script.lives["once"] == 1


async def test_who_returns_by_itself_while_its_group_is_being_stopped_begins_again(
    script: Script, autojump_clock: MockClock
) -> None:
    ended: list[str] = []
    supervisor = script.supervisor(
        script.child("fails", fails=1, after=1.0),
        script.child("returns", runs=2.0, ended=lambda: ended.append("returns")),
        script.child("deaf", hears=False, grace=5.0),
        strategy=Strategy.ONE_FOR_ALL,
    )
    await until_stopped(supervisor, 7.5)
    assert script.lives == {"fails": 2, "returns": 2, "deaf": 2}
    assert ended == []


async def test_a_return_while_the_group_is_being_stopped_is_no_failure(
    script: Script, autojump_clock: MockClock
) -> None:
    supervisor = script.supervisor(
        script.child("fails", fails=1, after=1.0),
        script.child("always", ALWAYS, runs=2.0, significant=True),
        script.child("deaf", hears=False, grace=5.0),
        strategy=Strategy.ONE_FOR_ALL,
    )
    await until_stopped(supervisor, 7.5)
    assert script.lives == {"fails": 2, "always": 2, "deaf": 2}
    assert supervisor.restarts == 1


async def test_a_significant_child_that_is_done_ends_the_supervisor_though_its_group_is_being_stopped(
    script: Script, autojump_clock: MockClock
) -> None:
    supervisor = script.supervisor(
        script.child("fails", fails=1, after=1.0),
        script.child("main", runs=2.0, significant=True),
        script.child("deaf", hears=False, grace=5.0),
        strategy=Strategy.ONE_FOR_ALL,
    )
    await supervisor.run()
    assert script.lives == {"fails": 1, "main": 1, "deaf": 1}


def test_a_crash_right_after_coming_up_starts_no_sibling_twice(run_seeded: Callable[..., Any]) -> None:
    async def main() -> None:
        alive: list[str] = []
        starts = 0

        async def crashes(stop: trio.Event, *, task_status: Status) -> None:
            nonlocal starts
            starts += 1
            assert not alive
            task_status.started()
            if starts <= 3:
                raise ValueError("crashed")
            await stop.wait()

        async def follows(stop: trio.Event, *, task_status: Status) -> None:
            alive.append("follows")
            task_status.started()
            await stop.wait()
            alive.remove("follows")

        supervisor = Supervisor(
            "test",
            [Child("crashes", crashes, ON_ERROR), Child("follows", follows, ON_ERROR)],
            strategy=Strategy.REST_FOR_ONE,
            backoff=partial(Backoff, first=0.0),
        )
        await until_stopped(supervisor, 1.0)
        assert starts == 4

    for seed in range(20):
        run_seeded(seed, main)


async def test_two_siblings_that_fail_at_the_same_moment_are_one_failure_of_the_group(
    script: Script, autojump_clock: MockClock
) -> None:
    supervisor = script.supervisor(
        script.child("a", fails=1), script.child("b", fails=1), strategy=Strategy.ONE_FOR_ALL, max_restarts=1
    )
    await until_stopped(supervisor, 10.0)
    assert script.lives == {"a": 2, "b": 2}
    assert supervisor.restarts == 1


async def test_a_failure_before_the_restarting_group_widens_it(script: Script, autojump_clock: MockClock) -> None:
    supervisor = script.supervisor(
        script.child("a", fails=1, after=2.0),
        script.child("b", fails=1, after=1.0),
        script.child("c", hears=False, grace=5.0),  # holds up the restart of b until a has failed too
        strategy=Strategy.REST_FOR_ONE,
    )
    await until_stopped(supervisor, 30.0)
    assert script.events == ["+a", "+b", "+c", "-b", "-a", "-c", "+a", "+b", "+c", "-c", "-b", "-a"]
    ends = {exited.name: exited.at for exited in script.exits[:3]}
    assert ends["c"] - ends["b"] == 5.0  # being asked to stop a second time prolonged nothing
    assert supervisor.restarts == 2


async def test_a_crash_while_a_sibling_is_starting_restarts_by_the_strategy(
    script: Script, autojump_clock: MockClock
) -> None:
    supervisor = script.supervisor(
        script.child("a", fails=1, after=1.0),
        script.child("b", up_after=3.0),
        script.child("c"),
        strategy=Strategy.REST_FOR_ONE,
    )
    await until_stopped(supervisor, 30.0)
    assert script.events == ["+a", "+b", "-a", "-b", "+a", "+b", "+c", "-c", "-b", "-a"]


async def test_a_failure_while_the_group_starts_again_restarts_it_once_more(
    script: Script, autojump_clock: MockClock
) -> None:
    lives = 0

    async def fragile(stop: trio.Event, *, task_status: Status) -> None:
        nonlocal lives
        lives += 1
        if lives == 2:
            raise ValueError("not up")
        task_status.started()
        await stop.wait()

    supervisor = script.supervisor(
        script.child("returned", runs=0.5),
        Child("fragile", fragile, ON_ERROR),
        script.child("fails", fails=1, after=1.0),
        strategy=Strategy.ONE_FOR_ALL,
    )
    await until_stopped(supervisor, 30.0)
    assert lives == 3
    assert script.lives == {"returned": 3, "fails": 2}
    assert supervisor.restarts == 2


@pytest.mark.parametrize("at", [1.5, 5.5, 8.5, 20.0])
async def test_a_stop_while_a_group_restarts_ends_well(script: Script, autojump_clock: MockClock, at: float) -> None:
    supervisor = script.supervisor(
        script.child("returned", runs=0.5),
        script.child("slow", up_after=4.0, hears=False, grace=1.0),
        script.child("fails", fails=1, after=1.0),
        strategy=Strategy.ONE_FOR_ALL,
        backoff=partial(Backoff, first=10.0),
    )
    started = trio.current_time()
    await until_stopped(supervisor, at)  # while it starts first, stops its group, backs off, and starts again
    assert trio.current_time() - started <= at + 1.0
    assert script.lives["slow"] == (2 if at == 20.0 else 1)
    assert Counter(event[1:] for event in script.events if event[0] == "+") == Counter(
        event[1:] for event in script.events if event[0] == "-"
    )


async def test_one_childs_backoff_does_not_delay_anothers_restart(script: Script, autojump_clock: MockClock) -> None:
    slow = partial(Backoff, first=100.0, longest=100.0)
    supervisor = script.supervisor(
        script.child("a", fails=1, after=1.0),
        script.child("b", runs=5.0, significant=True),
        backoff=slow,
    )
    started = trio.current_time()
    await supervisor.run()
    assert trio.current_time() - started == 5.0


async def test_backoff_grows_and_starts_over_after_a_healthy_life(script: Script, autojump_clock: MockClock) -> None:
    starts: list[float] = []
    ends: list[float] = []
    uptimes = [0.0, 0.0, 0.0, 100.0, 0.0]

    async def run(stop: trio.Event, *, task_status: Status) -> None:
        starts.append(trio.current_time())
        task_status.started()
        if len(starts) > len(uptimes):
            return
        await trio.sleep(uptimes[len(starts) - 1])
        ends.append(trio.current_time())
        raise ValueError("again")

    await script.supervisor(Child("a", run, ON_ERROR), max_restarts=9, backoff=partial(Backoff, first=1.0)).run()
    delays = [start - end for start, end in zip(starts[1:], ends, strict=True)]
    for delay, ceiling in zip(delays, [1.0, 2.0, 4.0, 1.0, 2.0], strict=True):
        assert ceiling / 2 <= delay <= ceiling


# Limits --------------------------------------------------------------------------------------------------------


async def test_a_restart_storm_ends_with_history_and_first_cause(script: Script, autojump_clock: MockClock) -> None:
    supervisor = script.supervisor(script.child("idle"), script.child("a", fails=99), max_restarts=3, window=60.0)
    with pytest.raises(RestartLimit, match=r"'test' would need 4 restarts within 60 s, .* First cause: .*a broke") as e:
        await supervisor.run()
    assert [exited.attempt for exited in e.value.history] == [1, 2, 3, 4]
    assert e.value.first_cause is e.value.__cause__ is e.value.history[0].error
    assert supervisor.restarts == 3
    assert script.ends[-1] == ("idle", "stopped")


async def test_failures_far_apart_are_forgiven(script: Script, autojump_clock: MockClock) -> None:
    supervisor = script.supervisor(script.child("a", fails=20, after=61.0), max_restarts=1, window=60.0)
    await until_stopped(supervisor, 3000.0)
    assert supervisor.restarts == 20


async def test_restarts_of_all_children_count_together(script: Script, autojump_clock: MockClock) -> None:
    children = [script.child(name, fails=1, after=index) for index, name in enumerate("abc")]
    with pytest.raises(RestartLimit):
        await script.supervisor(*children, max_restarts=2).run()


async def test_a_child_that_always_returns_runs_into_the_limit_without_a_cause(
    script: Script, autojump_clock: MockClock
) -> None:
    with pytest.raises(RestartLimit, match="every child returned") as caught:
        await script.supervisor(script.child("a", ALWAYS, runs=0.0)).run()
    assert caught.value.first_cause is None


async def test_an_error_that_is_not_restarted_fails_the_supervisor_at_once(
    script: Script, autojump_clock: MockClock
) -> None:
    started = trio.current_time()
    with pytest.raises(ValueError, match="a broke") as caught:
        await script.supervisor(
            script.child("deaf", hears=False, grace=50.0), script.child("a", NEVER, fails=1), script.child("b")
        ).run()
    assert trio.current_time() - started == 1.0
    assert caught.value.__notes__ == ["raised by 'a' (life 1) under 'test'"]
    assert script.ends == [("a", "failed"), ("b", "stopped"), ("deaf", "stopped")]


@pytest.mark.parametrize("restart", Restart)
@pytest.mark.parametrize("error", [RunError("hopeless"), ConfigError("impossible")])
async def test_a_final_error_is_never_restarted(
    script: Script, autojump_clock: MockClock, restart: Restart, error: TrouperError
) -> None:
    async def run(stop: trio.Event, *, task_status: Status) -> None:
        task_status.started()
        await trio.sleep(1.0)
        raise error

    started = trio.current_time()
    supervisor = script.supervisor(script.child("a", hears=False, grace=9.0), Child("b", run, restart))
    with pytest.raises(type(error)) as caught:
        await supervisor.run()
    assert caught.value is error
    assert trio.current_time() - started == 1.0
    assert supervisor.restarts == 0


async def test_one_final_error_makes_a_group_of_errors_final(script: Script, autojump_clock: MockClock) -> None:
    async def run(stop: trio.Event, *, task_status: Status) -> None:
        task_status.started()
        raise ExceptionGroup("both", [OSError("gone"), ExceptionGroup("inner", [RunError("hopeless"), ValueError()])])

    supervisor = script.supervisor(Child("a", run, ALWAYS))
    with pytest.RaisesGroup(OSError, RunError, ValueError, flatten_subgroups=True):
        await supervisor.run()
    assert supervisor.restarts == 0


async def test_a_final_error_of_a_life_that_is_not_up_yet_comes_as_it_is(
    script: Script, autojump_clock: MockClock
) -> None:
    lives = 0

    async def run(stop: trio.Event, *, task_status: Status) -> None:
        nonlocal lives
        lives += 1
        if lives == 2:
            raise CheckpointError("nothing to begin from")
        task_status.started()
        raise ValueError("crashed")

    with pytest.raises(CheckpointError, match="nothing to begin from"):
        await script.supervisor(script.child("a"), Child("b", run, ON_ERROR), strategy=Strategy.ONE_FOR_ALL).run()
    assert lives == 2


@pytest.mark.parametrize("first", ["sibling fails", "stop"])
async def test_a_final_error_of_a_child_that_is_being_stopped_counts(
    script: Script, autojump_clock: MockClock, first: str
) -> None:
    async def run(stop: trio.Event, *, task_status: Status) -> None:
        task_status.started()
        await stop.wait()
        raise RunError("hopeless")

    fails = 1 if first == "sibling fails" else 0
    supervisor = script.supervisor(
        script.child("a", fails=fails), Child("b", run, ON_ERROR), strategy=Strategy.ONE_FOR_ALL
    )
    with pytest.RaisesGroup(pytest.RaisesExc(RunError, match="hopeless")):
        await until_stopped(supervisor, 30.0)
    assert script.lives == {"a": 1}


async def test_a_final_error_spoils_a_graceful_end(script: Script, autojump_clock: MockClock) -> None:
    async def run(stop: trio.Event, *, task_status: Status) -> None:
        task_status.started()
        await trio.sleep(2.0)
        raise RunError("hopeless")

    supervisor = script.supervisor(Child("a", run, ON_ERROR), script.child("deaf", hears=False, grace=5.0))
    with pytest.RaisesGroup(pytest.RaisesExc(RunError, match="hopeless")):
        await until_stopped(supervisor, 1.0)  # the deaf one is being stopped when the other one fails


# Starting ------------------------------------------------------------------------------------------------------


async def _returns(stop: trio.Event, *, task_status: Status) -> None:
    pass


async def _raises(stop: trio.Event, *, task_status: Status) -> None:
    raise OSError("no port")


async def _never_up(stop: trio.Event, *, task_status: Status) -> None:
    await trio.sleep_forever()


@pytest.mark.parametrize(
    ("run", "message", "cause"),
    [
        (_returns, "'late' under 'test' returned before it was up", type(None)),
        (_raises, "'late' under 'test' raised OSError: no port before it was up", OSError),
        (_never_up, r"'late' under 'test' was not up within start_timeout = 7 s", type(None)),
    ],
)
async def test_a_child_that_does_not_come_up_is_named(
    script: Script, autojump_clock: MockClock, run: Callable[..., Any], message: str, cause: type
) -> None:
    late = Child("late", run, ALWAYS, start_timeout=7.0)
    with pytest.raises(StartError, match=message) as caught:
        await script.supervisor(script.child("a"), late, script.child("c")).run()
    assert isinstance(caught.value.__cause__, cause)
    assert script.events == ["+a", "-a"]


async def test_a_restart_that_does_not_come_up_is_tried_again(script: Script, autojump_clock: MockClock) -> None:
    lives = 0

    async def run(stop: trio.Event, *, task_status: Status) -> None:
        nonlocal lives
        lives += 1
        if lives == 2:
            await trio.sleep_forever()
        if lives == 3:
            raise OSError("no port")
        task_status.started()
        if lives == 1:
            raise ValueError("broke")

    await script.supervisor(Child("a", run, ON_ERROR, start_timeout=5.0)).run()
    assert lives == 4
    assert [type(exited.error) for exited in script.exits] == [ValueError, StartError, StartError, type(None)]


async def test_calling_started_twice_is_an_error(script: Script) -> None:
    async def run(stop: trio.Event, *, task_status: Status) -> None:
        task_status.started()
        task_status.started()

    with pytest.raises(RuntimeError, match="'a' called started"):
        await script.supervisor(Child("a", run, NEVER)).run()


async def test_stopping_while_children_start_stops_what_is_there(script: Script, autojump_clock: MockClock) -> None:
    await until_stopped(script.supervisor(script.child("a"), script.child("b", up_after=50.0, grace=1.0)), 10.0)
    assert script.events == ["+a", "+b", "-b", "-a"]


# Stopping ------------------------------------------------------------------------------------------------------


async def test_a_child_that_ignores_stop_is_cancelled_after_its_grace(
    script: Script, autojump_clock: MockClock
) -> None:
    supervisor = script.supervisor(script.child("a"), script.child("deaf", hears=False, grace=4.0))
    started = trio.current_time()
    await until_stopped(supervisor, 1.0)
    assert trio.current_time() - started == 5.0
    assert script.ends == [("deaf", "stopped"), ("a", "stopped")]


async def test_a_child_that_outlives_its_cancellation_is_named(script: Script, autojump_clock: MockClock) -> None:
    async def shielded(stop: trio.Event, *, task_status: Status) -> None:
        task_status.started()
        with trio.CancelScope(shield=True):
            await trio.sleep(100.0)

    supervisor = script.supervisor(script.child("a"), Child("wedged", shielded, ON_ERROR, grace=1.0), patience=2.0)
    await until_stopped(supervisor, 1.0)
    assert script.ends == [("wedged", "stuck"), ("a", "stopped"), ("wedged", "stopped")]
    assert script.exits[1].at - script.exits[0].at == 0.0
    assert script.exits[0].at + 96.0 == script.exits[2].at


async def test_lives_of_a_stuck_child_do_not_overlap(script: Script, autojump_clock: MockClock) -> None:
    alive = 0

    async def shielded(stop: trio.Event, *, task_status: Status) -> None:
        nonlocal alive
        alive += 1
        assert alive == 1
        task_status.started()
        with trio.CancelScope(shield=True):
            await trio.sleep(100.0)
        alive -= 1

    supervisor = script.supervisor(
        script.child("a", fails=1),
        Child("wedged", shielded, ON_ERROR, grace=1.0),
        strategy=Strategy.ONE_FOR_ALL,
    )
    await until_stopped(supervisor, 300.0)
    assert ("wedged", "stuck") in script.ends
    assert script.lives["a"] == 2


async def test_a_significant_child_takes_its_siblings_along_gracefully(
    script: Script, autojump_clock: MockClock
) -> None:
    async def tidy(stop: trio.Event, *, task_status: Status) -> None:
        task_status.started()
        await stop.wait()
        await trio.sleep(3.0)
        script.events.append("tidied")

    await script.supervisor(
        Child("tidy", tidy, ON_ERROR), script.child("main", fails=1, runs=5.0, significant=True)
    ).run()
    assert script.events == ["+main", "-main", "+main", "-main", "tidied"]


async def test_an_error_while_being_stopped_is_raised_in_the_end(script: Script, autojump_clock: MockClock) -> None:
    async def untidy(stop: trio.Event, *, task_status: Status) -> None:
        task_status.started()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                await trio.sleep_forever()
        finally:
            raise KeyError("cleanup")

    supervisor = script.supervisor(script.child("a"), Child("untidy", untidy, ON_ERROR, grace=0.0))
    with pytest.RaisesGroup(pytest.RaisesExc(KeyError, match="cleanup")):
        await until_stopped(supervisor, 1.0)
    assert script.ends == [("untidy", "failed"), ("a", "stopped")]


async def test_a_failure_and_what_fails_in_its_wake_come_in_one_group(
    script: Script, autojump_clock: MockClock
) -> None:
    async def untidy(stop: trio.Event, *, task_status: Status) -> None:
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            raise KeyError("cleanup")

    with pytest.RaisesGroup(
        pytest.RaisesExc(ValueError, match="a broke"),
        pytest.RaisesExc(KeyError, match="cleanup"),
        match="'test' failed",
    ):
        await script.supervisor(script.child("a", NEVER, fails=1), Child("untidy", untidy, ON_ERROR)).run()


# Cancellation and interrupts -----------------------------------------------------------------------------------


async def test_cancellation_from_outside_ends_everything_at_once(script: Script, autojump_clock: MockClock) -> None:
    supervisor = script.supervisor(*(script.child(name, hears=False, grace=100.0) for name in "abc"))
    started = trio.current_time()
    with trio.move_on_after(1.5) as scope:
        await supervisor.run()
    assert scope.cancelled_caught
    assert trio.current_time() - started == 1.5
    assert sorted(script.ends) == [("a", "stopped"), ("b", "stopped"), ("c", "stopped")]


async def test_cancellation_does_not_swallow_a_bug_in_cleanup_or_restart_it(
    script: Script, autojump_clock: MockClock
) -> None:
    lives = 0

    async def untidy(stop: trio.Event, *, task_status: Status) -> None:
        nonlocal lives
        lives += 1
        task_status.started()

        async def inner() -> None:
            try:
                await trio.sleep_forever()
            finally:
                raise KeyError("cleanup")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(inner)
            await trio.sleep_forever()

    with pytest.RaisesGroup(pytest.RaisesExc(KeyError, match="cleanup"), flatten_subgroups=True):
        with trio.move_on_after(1.0):
            await script.supervisor(script.child("a"), Child("untidy", untidy, ALWAYS)).run()
    assert lives == 1


async def test_cancellation_does_not_swallow_an_error_that_replaced_it(
    script: Script, autojump_clock: MockClock
) -> None:
    async def untidy(stop: trio.Event, *, task_status: Status) -> None:
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            raise KeyError("cleanup")

    with pytest.RaisesGroup(pytest.RaisesExc(KeyError, match="cleanup"), flatten_subgroups=True):
        with trio.move_on_after(1.0):
            await script.supervisor(script.child("a"), Child("untidy", untidy, ALWAYS)).run()
    assert ("untidy", "failed") in script.ends


async def test_cancellation_while_failing_does_not_swallow_the_failure(
    script: Script, autojump_clock: MockClock
) -> None:
    async def shielded(stop: trio.Event, *, task_status: Status) -> None:
        task_status.started()
        with trio.CancelScope(shield=True):
            await trio.sleep(4.0)

    with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="a broke"), flatten_subgroups=True):
        with trio.move_on_after(2.0):
            await script.supervisor(Child("slow", shielded, ON_ERROR), script.child("a", NEVER, fails=1)).run()


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
async def test_interrupts_pass_through(
    script: Script, autojump_clock: MockClock, interrupt: type[BaseException]
) -> None:
    async def run(stop: trio.Event, *, task_status: Status) -> None:
        task_status.started()
        await trio.sleep(1.0)
        raise interrupt

    with pytest.RaisesGroup(interrupt, flatten_subgroups=True):
        await script.supervisor(script.child("a"), Child("b", run, ALWAYS)).run()
    assert script.ends == [("b", "stopped"), ("a", "stopped")]


async def test_a_group_with_one_error_in_it_is_unpacked(script: Script, autojump_clock: MockClock) -> None:
    async def run(stop: trio.Event, *, task_status: Status) -> None:
        task_status.started()
        async with trio.open_nursery() as outer, trio.open_nursery() as inner:
            outer.start_soon(trio.sleep_forever)
            inner.start_soon(trio.sleep_forever)
            raise ValueError("env 42")

    with pytest.raises(ValueError, match="env 42"):
        await script.supervisor(Child("a", run, NEVER)).run()
    assert isinstance(script.exits[0].error, ValueError)


async def test_a_group_that_also_holds_an_interrupt_keeps_it(script: Script, autojump_clock: MockClock) -> None:
    async def run(stop: trio.Event, *, task_status: Status) -> None:
        task_status.started()
        raise BaseExceptionGroup("both", [ValueError("env 42"), KeyboardInterrupt()])

    with pytest.RaisesGroup(ValueError, KeyboardInterrupt, flatten_subgroups=True):
        await script.supervisor(Child("a", run, ALWAYS)).run()


# Nesting -------------------------------------------------------------------------------------------------------


async def test_a_nested_supervisors_limit_escalates(script: Script, autojump_clock: MockClock) -> None:
    inner = Supervisor("inner", [script.child("a", fails=99, after=0.1)], max_restarts=2)
    outer = script.supervisor(Child("inner", inner.run, ON_ERROR, grace=float("inf")), max_restarts=1)
    with pytest.raises(
        RestartLimit,
        match="'test' would need 2 restarts within 60 s, and max_restarts = 1: 'inner' raised RestartLimit",
    ) as caught:
        await outer.run()
    assert isinstance(caught.value.first_cause, RestartLimit)
    assert isinstance(caught.value.first_cause.first_cause, ValueError)
    assert script.lives["a"] == 6
    assert (inner.restarts, outer.restarts) == (4, 1)


async def test_a_nested_supervisor_is_up_when_its_children_are_and_stops_with_their_grace(
    script: Script, autojump_clock: MockClock
) -> None:
    inner = Supervisor("inner", [script.child("a", up_after=3.0, hears=False, grace=2.0), script.child("b")])
    outer = script.supervisor(Child("inner", inner.run, NEVER, grace=float("inf")), script.child("c"))
    await until_stopped(outer, 10.0)
    assert script.events == ["+a", "+b", "+c", "-c", "-b", "-a"]
    assert script.ends == [("c", "stopped"), ("inner", "stopped")]


async def test_one_supervisor_does_not_run_twice_at_a_time(script: Script, autojump_clock: MockClock) -> None:
    supervisor = script.supervisor(script.child("a", runs=1.0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(RuntimeError, match="runs already"):
            await supervisor.run()


def test_any_schedule_keeps_the_promises(run_seeded: Callable[..., Any]) -> None:
    """Random children under random strategies: order, no overlap, exact counts, under many schedules."""
    for seed in range(120):
        run_seeded(seed, _fuzz, seed)


async def _fuzz(seed: int) -> None:
    rng = random.Random(seed)
    strategy = rng.choice(list(Strategy))
    alive: set[str] = set()
    crashes = 0

    def child(name: str, index: int) -> Child:
        async def run(stop: trio.Event, *, task_status: Status) -> None:
            nonlocal crashes
            assert name not in alive, "two lives at once"
            if strategy is not Strategy.ONE_FOR_ONE:
                assert not any(int(other) > index for other in alive), "started before a later one was stopped"
            alive.add(name)
            try:
                await trio.sleep(rng.choice([0.0, 1.0]))
                task_status.started()
                with trio.move_on_after(rng.choice([0.0, 1.0, 2.0, 5.0])):
                    await (stop if rng.random() < 0.7 else trio.Event()).wait()
                if rng.random() < 0.6 and not stop.is_set():
                    crashes += 1
                    raise ValueError(name)
                await stop.wait()
            finally:
                alive.discard(name)

        return Child(name, run, ON_ERROR, grace=rng.choice([0.0, 1.0, 3.0]))

    supervisor = Supervisor(
        "fuzz",
        [child(str(index), index) for index in range(rng.randint(1, 5))],
        strategy=strategy,
        max_restarts=10_000,
        backoff=partial(Backoff, first=rng.choice([0.0, 1.0])),
        seed=seed,
    )
    await until_stopped(supervisor, 40.0)
    assert not alive
    assert 0 < supervisor.restarts <= crashes or crashes == 0
