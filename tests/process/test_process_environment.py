"""Environments in processes of their own: whatever they do there, the run hears of it and nothing of them is left."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.process.running import MARK, marked
from trouper.actors.alarms import Alarms
from trouper.actors.backoff import Backoff
from trouper.actors.config import Environment as Section
from trouper.actors.environment import EnvironmentActor
from trouper.actors.process import ProcessEnvironment, process_factory
from trouper.actors.threads import Threads
from trouper.channels import ConfigError, EnvironmentFailure, RunError, Task
from trouper.envs import inline, load_object
from trouper.envs.checked import CheckedEnvironment


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Environments of this folder can be found, and after the test no process of theirs can."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    yield mark
    assert marked(mark) == {}


def section(name: str, **more: Any) -> Section:
    return Section(**{"name": f"misbehaving:{name}", "isolation": "process", "restart_backoff": 0.0} | more)


class Bench:
    """An environment's actor and a way to play attempts on it."""

    def __init__(self, where: str = "", how: str = "nothing", **limits: Any) -> None:
        limits = {"close_timeout": 50.0} | limits
        given = section("Misbehaving", arguments={"where": where, "how": how}, **limits)
        self.notes: list[str] = []
        self.seen: list[Exception] = []
        threads = Threads(1, 1, "thread")
        self.alarms = Alarms()
        backoff = Backoff("0", first=0.0, longest=0.0)
        self.world = EnvironmentActor(
            process_factory(given, given.name), given, threads, self.alarms, backoff, self.notes.append
        )

    async def attempt(self) -> float | None:
        """The score, or None when the attempt was cancelled from outside."""
        with trio.move_on_after(60) as scope:
            self.world.begin(Task("t"), 7, scope)
            try:
                await self.world.prepare()
                await self.world.reset()
                await self.world.call("count", {})
                while not self.world.done:
                    await self.world.step("x")
                return await self.world.score()
            except Exception as error:
                self.seen.append(error)
        return None

    async def failure(self, mark: str) -> EnvironmentFailure:
        """What an attempt fails of; the environment goes of itself, and is not asked to close."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.alarms.run)
            nursery.start_soon(self.world.serve)
            assert await self.attempt() is None
            with trio.fail_after(20):
                while marked(mark):  # noqa: ASYNC110
                    await trio.sleep(0.01)  # a process that ends sets no event
            nursery.cancel_scope.cancel()
        assert self.seen == []  # the agent was cancelled, not told
        assert self.notes == []
        assert self.world.failure is not None
        return self.world.failure


async def said(call: Any) -> Any:
    """What a call gave, or how it failed."""
    try:
        return await call
    except EnvironmentFailure as failure:
        return failure.kind, str(failure), failure.retry
    except RunError as error:
        return "run", str(error)
    except Exception as error:  # only beside the agent; the environment's actor says it in these words
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        return "env_error", f"{type(error).__name__}: {error}", True


async def transcript(world: CheckedEnvironment | ProcessEnvironment) -> list[Any]:
    payload = {"tuple": (1, 2), "bytes": b"b", "big": 1 << 100, "set": {3}}
    heard = [world.name, world.tools, await said(world.reset(Task("t", payload), 7))]
    actions = ["fine", "numpy", "three", "gymnasium", "nan", "bytes", "metric", "long"]
    actions += ["noise", "hopeless", "end", "group", "nowhere"]
    heard += [await said(world.step(action)) for action in actions]
    heard += [
        await said(world.call_tool(name, arguments))
        for name, arguments in [
            ("measure", {"what": "it", "how": "exact", "digits": 3}),
            ("measure", {"what": "nothing"}),
            ("measure", {"what": "zero"}),
            ("measure", {"what": "broken"}),
            ("measure", {"who": "it"}),
            ("think", {"seconds": 0.5}),
            ("give", {"kind": "numpy"}),
            ("give", {"kind": "set"}),
            ("give", {"kind": "list"}),
            ("give", {"kind": "nothing"}),
            ("guess", {}),
        ]
    ]
    return [*heard, await said(world.score(3.0))]


async def test_in_a_process_an_environment_says_what_it_says_beside_the_agent() -> None:
    given = section("Talkative", arguments={"unit": "mm"})
    here = await transcript(CheckedEnvironment(load_object(given.name)(unit="mm"), inline))
    there = await process_factory(given, given.name)()
    heard = await transcript(there)
    # What is raised there comes with the call in front, as the actor puts it for environments beside the agent.
    assert [
        (answer[0], answer[1].removeprefix("step: ").removeprefix("call_tool: "), *answer[2:])
        if isinstance(answer, tuple) and answer[:1] == ("env_error",)
        else answer
        for answer in heard
    ] == here
    assert (await there.step("alarm")).observation == "armed"
    with pytest.raises(EnvironmentFailure, match=r"has \d+ bytes; at most 16777216 pass between processes"):
        await there.step("endless")
    with pytest.raises(EnvironmentFailure, match="reset: what the environment is given has"):
        await there.reset(Task("t", {"long": "x" * (17 << 20)}), 7)
    assert (await there.step("fine")).observation == "seen"  # it can still be used
    await there.close()


async def test_a_failure_brings_the_traceback_of_code_that_is_not_ours() -> None:
    given = section("Misbehaving", arguments={"where": "step", "how": "raise_"})
    environment = await process_factory(given, given.name)()
    with pytest.raises(EnvironmentFailure) as caught:
        await environment.step("x")
    assert str(caught.value) == "step: OSError: env 42"
    assert 'raise OSError("env 42")' in str(caught.value.__cause__)
    assert "misbehaving.py" in str(caught.value.__cause__)
    await environment.close()


@pytest.mark.parametrize("where", ["create", "reset", "step", "tool", "reward"])
@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("raise_", "env_error", "OSError: env 42"),
        ("raise_in_a_circle", "env_error", "OSError: env 42"),
        ("exit_politely", "env_error", "RuntimeError: SystemExit: 4"),
        ("ask_for_a_loop", "env_error", 'needs environment.async_library = "asyncio"'),
        ("hang", "env_timeout", ""),
    ],
)
async def test_a_call_that_fails_costs_the_attempt(mark: str, where: str, how: str, kind: str, words: str) -> None:
    limit = {"tool": "step"}.get(where, where) + "_timeout"
    limits = {limit: 1.0 if where == "create" else 0.1} if how == "hang" else {}
    failure = await Bench(where, how, **limits).failure(mark)
    assert failure.kind == kind
    assert (words or f"environment.{limit}") in str(failure)


@pytest.mark.parametrize(
    ("how", "limits", "words"),
    [
        ("segfault", {}, "Misbehaving died in step 1: signal SIGSEGV; last output: the last thing it said"),
        ("exit_at_once", {}, "Misbehaving died in step 1: exit code 3; last output: the last thing it said"),
        ("kill_itself", {}, "signal SIGKILL"),
        ("kill_its_group", {}, "signal SIGKILL"),
        ("daemonize_and_die", {}, "exit code 5"),
        ("scribble", {}, "Misbehaving was killed in step: what it sent has 4294967295 bytes"),
        ("take_memory", {"max_memory_mib": 2048}, "step: MemoryError: ; environment.max_memory_mib = 2048"),
        ("burn", {"max_cpu_seconds": 1.0}, "it used the CPU time that environment.max_cpu_seconds allows"),
        ("bomb", {"max_processes": 10}, "processes; environment.max_processes = 10"),
    ],
)
async def test_a_death_is_told_at_once_and_by_its_cause(
    mark: str, how: str, limits: dict[str, Any], words: str
) -> None:
    failure = await Bench("step", how, **limits).failure(mark)  # step_timeout is a minute, and so is the attempt's
    assert failure.kind == "env_died"
    assert words in str(failure)


@pytest.mark.parametrize("how", ["deadlock", "ignore_everything"])
async def test_what_hangs_for_good_is_killed(mark: str, how: str) -> None:
    assert (await Bench("step", how, step_timeout=0.1).failure(mark)).kind == "env_timeout"


@pytest.mark.parametrize("how", ["daemonize", "start_a_shell", "come_back_twice", "run_away"])
async def test_processes_that_an_environment_leaves_behind_end_with_it(mark: str, how: str) -> None:
    bench = Bench("step", how)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.alarms.run)
        nursery.start_soon(bench.world.serve)
        assert await bench.attempt() == 1.0
        assert len(marked(mark)) >= (3 if how in ("daemonize", "start_a_shell") else 2)
        assert await bench.attempt() == 1.0
        nursery.cancel_scope.cancel()
    assert bench.world.restarts == 0
    assert bench.notes == []


@pytest.mark.parametrize(
    ("how", "note"),
    [
        ("raise_", ["Misbehaving.close failed: close: OSError: env 42"]),
        ("hang", ["Misbehaving.close failed: close took longer than environment.close_timeout = 0.1 s"]),
        (
            "exit_at_once",
            ["Misbehaving.close failed: Misbehaving died in close: exit code 3; last output: the last thing it said"],
        ),
    ],
)
async def test_a_close_that_fails_is_noted(how: str, note: list[str]) -> None:
    bench = Bench("close", how, close_timeout=0.1 if how == "hang" else 50.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.alarms.run)
        nursery.start_soon(bench.world.serve)
        assert await bench.attempt() == 1.0
        nursery.cancel_scope.cancel()
    assert bench.notes == note


async def test_a_process_that_dies_between_calls_is_found_at_the_next(mark: str) -> None:
    given = section("Misbehaving")
    environment = await process_factory(given, given.name)()
    await environment.reset(Task("t"), 7)
    os.kill(max(marked(mark)), signal.SIGKILL)  # its keeper is older
    with pytest.raises(EnvironmentFailure, match="died in step 1: signal SIGKILL"):
        await environment.step("x")
    assert marked(mark) == {}  # before anybody closed it
    await environment.close()


@pytest.mark.parametrize("after", [0.0, 0.01, 0.05, 0.1, 0.15, 0.2])
async def test_a_start_may_be_cancelled_at_any_moment(after: float) -> None:
    given = section("Misbehaving", arguments={"where": "create", "how": "daemonize"})
    with trio.move_on_after(after):
        environment = await process_factory(given, given.name)()
        with trio.CancelScope(shield=True):
            await environment.close()


async def test_async_methods_for_asyncio_have_one_loop_that_goes_on_between_calls() -> None:
    given = section("Ticking", async_library="asyncio")
    environment = await process_factory(given, given.name)()
    assert await environment.reset(Task("t"), 7) == "asyncio"
    while (await environment.step("")).observation == "0":
        pass
    await environment.close()


async def test_the_state_of_a_process_is_an_environments_own(tmp_path: Path) -> None:
    make = process_factory(section("Global"), "misbehaving:Global")
    first, second = await make(), await make()
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    await first.reset(Task("1", {"directory": str(tmp_path / "1")}), 7)
    await second.reset(Task("2", {"directory": str(tmp_path / "2")}), 7)
    assert (await first.step("")).observation == f"1 in {tmp_path / '1'}"
    assert (await second.step("")).observation == f"2 in {tmp_path / '2'}"
    await first.close()
    await second.close()
    assert "WHO" not in os.environ


PARENT = """
import msgspec, trio, trio.testing
from trouper.actors.config import Environment
from trouper.actors.process import process_factory
from trouper.channels import Task

async def main():
    arguments = {"where": "reset", "how": "daemonize"}
    given = Environment(name="misbehaving:Misbehaving", arguments=arguments, isolation="process")
    first = await process_factory(given, given.name)()
    given = msgspec.structs.replace(given, arguments={"where": "step", "how": "ignore_everything"})
    second = await process_factory(given, given.name)()
    await first.reset(Task("t"), 7)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(second.step, "x")
        await trio.testing.wait_all_tasks_blocked()
        print("up", flush=True)

trio.run(main)
"""


def test_a_parent_that_is_killed_leaves_nothing(mark: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        assert len(marked(mark)) == 6  # the parent, two keepers, two environments and the daemon of one of them
    finally:
        parent.kill()
        parent.communicate()
    deadline = time.monotonic() + 20
    while marked(mark):
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Local:
    """Here, where no other process can import it."""


@pytest.mark.parametrize(
    ("name", "make", "arguments", "words"),
    [
        ("misbehaving:Nowhere", "misbehaving:Nowhere", {}, "has no 'Nowhere'"),
        ("__main__:Environment", Local, {}, "put it at the top of a module that can be imported"),
        ("misbehaving:Global", Local, {}, "'misbehaving:Global' cannot be found by its name"),
        ("misbehaving:Talkative", "misbehaving:Talkative", {}, "takes"),
        ("misbehaving:Talkative", "misbehaving:Talkative", {"unit": lambda: 1}, "arguments cannot be pickled"),
    ],
)
def test_what_another_process_cannot_make_is_refused(name: str, make: Any, arguments: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        process_factory(Section(name=name, arguments=arguments, isolation="process"), make)
