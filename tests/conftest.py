"""Virtual time for every test: a deadlock fails at once, and a seed picks a schedule."""

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing

DEADLOCK = 1_000_000.0
"""Virtual seconds after which a test is taken for deadlocked; an autojump clock is there within a millisecond."""


def _guarded(function: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(function)
    async def guarded(*args: Any, **kwargs: Any) -> Any:
        with trio.fail_after(DEADLOCK):
            return await function(*args, **kwargs)

    return guarded


FEW, MANY = 50, 200
"""Seeds of the simulation that every run of the tests plays, and those that one with the slow tests does."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--seeds N` plays seeds 0 to N - 1 of the simulation, `--seeds FIRST:END` those from FIRST to END - 1."""
    parser.addoption("--kills", type=int, default=1, help="how often a real run is killed, and sent each signal")
    parser.addoption("--seeds", help=f"seeds of the simulation: N or FIRST:END; by default {MANY}, {FEW} of them quick")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `soak_seed` is played once for each seed."""
    if "soak_seed" not in metafunc.fixturenames:
        return
    chosen: str | None = metafunc.config.getoption("--seeds")
    if chosen is None:
        seeds = [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= FEW)) for seed in range(MANY)]
        metafunc.parametrize("soak_seed", seeds)
    else:
        metafunc.parametrize("soak_seed", range(*map(int, chosen.split(":"))))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every async test in virtual time runs under a deadline, so that a deadlock fails instead of hanging."""
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and "autojump_clock" in item.fixturenames
            and inspect.iscoroutinefunction(item.obj)
        ):
            item.obj = _guarded(item.obj)


@pytest.fixture
def run_seeded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`run_seeded(seed, function, *args)` runs an async function in virtual time under the schedule a seed picks."""
    monkeypatch.setattr(trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)

    def run(seed: int, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        trio._core._run._r.seed(seed)
        clock = trio.testing.MockClock(autojump_threshold=0)
        return trio.run(_guarded(function), *args, clock=clock)

    return run
