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
