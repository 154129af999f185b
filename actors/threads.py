"""Where user code runs that is not async: threads that can be given up, counted and bounded."""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, Literal

import trio

from trouper.channels import RunError


class Threads:
    """Runs plain and async functions of environments and rewards.

    A thread cannot be killed: a call that outlives its deadline leaves its thread behind until the call returns.

    Args:
        concurrency: calls that may run side by side.
        max_abandoned: threads left behind at the same time; one more ends the run.
        isolation: `thread`, or `inline` to call on the event loop (fast, but a call that hangs hangs the run).
    """

    def __init__(self, concurrency: int, max_abandoned: int, isolation: Literal["thread", "inline"]) -> None:
        self.abandoned = 0
        self._max_abandoned = max_abandoned
        self._inline = isolation == "inline"
        self._limiter = trio.CapacityLimiter(concurrency + max_abandoned)

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run a function without arguments and return its value.

        Raises:
            RunError: too many threads were left behind.
        """
        if self._inline or _is_async(function):
            value = function()
            return await value if inspect.isawaitable(value) else value
        if self.abandoned > self._max_abandoned:
            raise RunError(
                f"{self.abandoned} threads of user code outlived their deadlines and still run; "
                f"environment.max_abandoned_threads allows {self._max_abandoned}. A thread cannot be killed: give the "
                "environment's calls a timeout of their own, or make them async"
            )
        token = trio.lowlevel.current_trio_token()
        running = left_behind = given_up = False
        change = threading.Lock()

        def run() -> tuple[Any]:  # boxed: Trio lets no thread return a coroutine
            nonlocal running
            with change:
                if given_up:
                    return (None,)
                running = True
            try:
                return (function(),)
            finally:
                with change:
                    running = False
                    if left_behind:
                        with contextlib.suppress(trio.RunFinishedError):
                            token.run_sync_soon(self._came_back)

        try:
            (value,) = await trio.to_thread.run_sync(run, abandon_on_cancel=True, limiter=self._limiter)
        except trio.Cancelled:
            with change:
                given_up = True
                if running:  # else it has just ended, or never began
                    left_behind = True
                    self.abandoned += 1
            raise
        return await value if inspect.isawaitable(value) else value

    def _came_back(self) -> None:
        self.abandoned -= 1


def _is_async(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
