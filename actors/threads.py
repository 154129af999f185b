"""Where user code runs: plain functions in threads that can be given up, async ones on their event loop.

Knows nothing of environments. What is given up is counted and bounded; what user code raises costs an attempt, and
only interrupts and Trio's own cancellation go further.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, Literal

import trio

from trouper.actors.portal import AsyncioPortal
from trouper.channels import RunError

INTERRUPTS = (KeyboardInterrupt, SystemExit, GeneratorExit, trio.Cancelled)
"""What is not about the code that raised it."""


class Threads:
    """Runs plain and async functions of environments and rewards.

    A thread cannot be killed: a call that outlives its deadline leaves its thread behind until the call returns. An
    asyncio task that ignores its cancellation is left behind and counted in the same way.

    Args:
        concurrency: calls that may run in threads side by side.
        max_abandoned: calls left behind at the same time; one more ends the run.
        isolation: `inline` calls plain functions on the event loop (fast, but a call that hangs hangs the run);
            anything else calls them in threads.
        async_library: whose loop async functions run on: this one, Trio's, or one for `asyncio` in a thread of its
            own, which the first call starts and `close` ends.
    """

    def __init__(
        self,
        concurrency: int,
        max_abandoned: int,
        isolation: Literal["thread", "inline", "process"],
        async_library: Literal["trio", "asyncio"] = "trio",
    ) -> None:
        self._threads_left = 0
        self._max_abandoned = max_abandoned
        self._inline = isolation == "inline"
        self._limiter = trio.CapacityLimiter(concurrency + max_abandoned)
        self._portal = AsyncioPortal() if async_library == "asyncio" else None

    @property
    def abandoned(self) -> int:
        """Calls left behind that still run."""
        return self._threads_left + (self._portal.abandoned if self._portal is not None else 0)

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run a function without arguments and return its value, awaited if it is awaitable.

        Raises:
            RunError: too many calls were left behind.
            Exception: whatever the function raised; a `BaseException` that is no interrupt comes as a `RuntimeError`.
        """
        try:
            if self._inline or is_async(function):
                return await self._on_loop(function)
            value = await self._in_thread(function)
            return await self._on_loop(lambda: value) if inspect.isawaitable(value) else value
        except BaseException as error:
            failure = as_failure(error)
            advice = self._advice(failure)
            if advice:
                failure = RuntimeError(f"{failure}. {advice}")
            if failure is error:
                raise
            raise failure from error

    async def close(self) -> None:
        """End the asyncio loop, if one was started."""
        if self._portal is not None:
            await self._portal.close()

    async def _on_loop(self, function: Callable[[], Any]) -> Any:
        if self._portal is not None:
            self._check_abandoned()
            return await self._portal.call(function)
        value = function()
        return await value if inspect.isawaitable(value) else value

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        self._check_abandoned()
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
                    self._threads_left += 1
            raise
        return value

    def _came_back(self) -> None:
        self._threads_left -= 1

    def _check_abandoned(self) -> None:
        if self.abandoned > self._max_abandoned:
            raise RunError(
                f"{self.abandoned} calls of user code outlived their deadlines and still run; "
                f"environment.max_abandoned_threads allows {self._max_abandoned}. Neither a thread nor an asyncio task "
                "that ignores its cancellation can be killed: give the environment's calls a timeout of their own, "
                'or set environment.isolation = "process"'
            )

    def _advice(self, error: BaseException) -> str:
        """What to do about code that meets another event loop than its own."""
        text = str(error) if isinstance(error, RuntimeError | TypeError) else ""
        if "no running event loop" in text or "no current event loop" in text or "unrecognized yield message" in text:
            if self._portal is None:
                return 'Code that is written for asyncio needs environment.async_library = "asyncio"'
            return 'A plain function has no loop in its thread: make it async, or set environment.isolation = "inline"'
        if self._portal is not None and "must be called from async context" in text:
            return 'Code that is written for Trio needs environment.async_library = "trio"'
        return ""


def is_async(function: Any) -> bool:
    """Whether calling it gives a coroutine."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def as_failure(error: BaseException) -> BaseException:
    """What user code raised, with every leaf either an `Exception` that has a text or one of `INTERRUPTS`.

    asyncio's `CancelledError` and the panics of Rust extensions are neither: they are about the code that raised them
    and must not end a run, so they become a `RuntimeError` that names them.
    """
    if isinstance(error, INTERRUPTS):
        return error
    if not isinstance(error, BaseExceptionGroup):
        try:
            text = str(error)
        except Exception as failure:  # the error's own code is user code, too
            text = f"its text cannot be shown, since its __str__ raised {type(failure).__name__}"
        else:
            if isinstance(error, Exception):
                return error
        return RuntimeError(f"{type(error).__name__}: {text}")
    leaves = [as_failure(leaf) for leaf in error.exceptions]
    unchanged = all(leaf is old for leaf, old in zip(leaves, error.exceptions, strict=True))
    return error if unchanged else error.derive(leaves)
