"""Where user code runs: plain functions in threads that can be given up, async ones on their event loop.

Knows nothing of environments. What is given up is counted and bounded; what user code raises costs an attempt, and
only Ctrl-C and Trio's own cancellation go further.
"""

import contextlib
import inspect
import os
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Literal

import trio

from trouper.actors.aside import Aside
from trouper.actors.portal import AsyncioPortal
from trouper.channels import RunError
from trouper.envs.async_library import wrong_loop


class StillRuns(Exception):
    """A task was cancelled, did not end, and was left behind."""


class Threads:
    """Runs plain and async functions of environments and rewards.

    A thread cannot be killed: a call that outlives its deadline leaves its thread behind until the call returns. A
    task that ignores its cancellation, be it Trio's or asyncio's, is left behind and counted in the same way.

    Args:
        concurrency: calls that may run in threads side by side.
        max_abandoned: calls left behind at the same time; one more ends the run.
        isolation: `inline` calls plain functions on the event loop (fast, but a call that hangs hangs the run);
            anything else calls them in threads.
        async_library: whose loop async functions run on: this one, Trio's, or one for `asyncio` in a thread of its
            own, which the first call starts and `close` ends.

    Attributes:
        starting: held by environments while their processes start, as many as there are cores.
    """

    def __init__(
        self,
        concurrency: int,
        max_abandoned: int,
        isolation: Literal["thread", "inline", "process"],
        async_library: Literal["trio", "asyncio"] = "trio",
    ) -> None:
        self.starting = trio.CapacityLimiter(os.cpu_count() or 1)
        self._left = 0  # threads and tasks of Trio's
        self._async_library = async_library
        self._max_abandoned = max_abandoned
        self._inline = isolation == "inline"
        self._limiter = trio.CapacityLimiter(concurrency + max_abandoned)
        self._portal = AsyncioPortal() if async_library == "asyncio" else None

    @property
    def abandoned(self) -> int:
        """Calls left behind that still run."""
        return self._left + (self._portal.abandoned if self._portal is not None else 0)

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run a function without arguments and return its value, awaited if it is awaitable.

        Raises:
            RunError: too many calls were left behind.
            Exception: whatever the function raised; see `as_failure`.
        """
        try:
            if self._inline or is_async(function):
                return await self._on_loop(function)
            value = await self._in_thread(function)
            return await self._on_loop(lambda: value) if inspect.isawaitable(value) else value
        except BaseException as error:
            failure = as_failure(error)
            advice = wrong_loop(failure, self._async_library)
            if advice:
                failure = RuntimeError(f"{failure}. {advice}")
            if failure is error:
                raise
            raise failure from error

    async def aside(
        self, function: Callable[[], Awaitable[Any]], patience: Callable[[], float], what: str = "user code"
    ) -> Any:
        """Await a function of Trio's in a task of its own, which is left behind if it does not end.

        Args:
            function: without arguments.
            patience: when the caller is cancelled, so is the task, and has so many seconds to end.
            what: names the task.

        Raises:
            RunError: too many calls were left behind.
            BaseExceptionGroup: the caller was cancelled; beside the cancellation it holds what the task raised, or
                `StillRuns`.
            Exception: whatever the function raised; see `as_failure`.
        """
        task = self.start(function, what)
        try:
            await task.ended.wait()
        except trio.Cancelled as cancelled:
            failure = await self.end(task, patience())
            if failure is None:
                raise
            raise BaseExceptionGroup("cancelled", [failure, cancelled]) from None
        if task.error is None:
            return task.value
        failure = as_failure(task.error)
        if failure is task.error:
            raise failure
        raise failure from task.error

    def start(
        self, function: Callable[[], Awaitable[Any]], what: str, at_end: Callable[[Aside], None] = lambda task: None
    ) -> Aside:
        """Have a function of Trio's run in a task of its own; whoever asks for it has to `end` it.

        Raises:
            RunError: too many calls were left behind.
        """
        self._check_abandoned()
        return Aside(function, what, at_end)

    async def end(self, task: Aside, patience: float) -> BaseException | None:
        """Cancel a task and wait for its end, at most so many seconds.

        Returns:
            What it raised, as `as_failure` has it, or a `StillRuns` for one that was left behind.
        """
        task.scope.cancel()
        with trio.move_on_after(patience, shield=True):
            await task.ended.wait()
        if not task.ended.is_set():
            self.leave(task)
            return StillRuns(str(task))
        return as_failure(task.error) if task.error else None

    def leave(self, task: Aside) -> None:
        """Cancel a task that is known not to end, and leave it behind."""
        task.scope.cancel()
        self._left += 1
        task.leave(self._came_back)

    async def close(self) -> None:
        """End the asyncio loop, if one was started."""
        if self._portal is not None:
            await self._portal.close()

    async def _on_loop(self, function: Callable[[], Any]) -> Any:
        if self._portal is not None:
            self._check_abandoned()
            return await self._portal.call(partial(_awaited, function))
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
            except KeyboardInterrupt as error:  # nobody pressed Ctrl-C: Python raises that in the main thread
                raise as_failure(error) from error
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
                    self._left += 1
            raise
        return value

    def _came_back(self) -> None:
        self._left -= 1

    def _check_abandoned(self) -> None:
        if self.abandoned > self._max_abandoned:
            raise RunError(
                f"{self.abandoned} calls of user code outlived their deadlines and still run; "
                f"environment.max_abandoned_threads allows {self._max_abandoned}. Neither a thread nor a task that "
                "ignores its cancellation can be killed: give the calls of environments and agents a timeout of their "
                'own, or set environment.isolation = "process"'
            )


async def _awaited(function: Callable[[], Any]) -> Any:
    try:
        value = function()
        return await value if inspect.isawaitable(value) else value
    except KeyboardInterrupt as error:  # as in a thread
        raise as_failure(error) from error


def is_async(function: Any) -> bool:
    """Whether calling it gives a coroutine."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None)
    if code is not None and code.co_flags & inspect.CO_COROUTINE:  # what it is nearly always, and ten times as quick
        return True
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def as_failure(error: BaseException) -> BaseException:
    """What user code raised, with every leaf an `Exception` that has a text, Trio's `Cancelled`, or Ctrl-C.

    What `sys.exit`, asyncio's `CancelledError` and the panics of Rust extensions raise is neither: it is about the
    code that raised it and must not end a run, so it becomes a `RuntimeError` that names it.
    """
    if isinstance(error, trio.Cancelled):
        return error
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
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
