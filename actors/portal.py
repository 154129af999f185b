"""One asyncio loop in a thread of its own: where user code runs that is written for asyncio, called from Trio.

A call that blocks the loop blocks all that run on it. When such a loop is found, it is named, left behind with all its
calls, and the next call gets a new one.

Knows neither environments nor limits. anyio starts and ends the loop; the calls themselves are plain asyncio tasks,
because anyio's scopes cancel a task again at every await, and code for asyncio expects to be cancelled once.
"""

import asyncio
import contextlib
import contextvars
import inspect
import logging
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import trio
from anyio.from_thread import start_blocking_portal

from trouper.actors.heartbeat import culprit
from trouper.channels import Reply

log = logging.getLogger(__name__)

CANCEL_GRACE = 1.0
"""Seconds a cancelled call has for its `finally` blocks before it is left behind."""

CLOSE_GRACE = 3.0
"""Seconds the loop has to end; after that its thread, a daemon, is left to the end of the process."""


class AsyncioPortal:
    """Calls functions on an asyncio loop; the first call starts it, and so does the first one after it died or stuck.

    Attributes:
        abandoned: calls that were cancelled and go on all the same; of those on a stuck loop only the one it is stuck
            in.
    """

    def __init__(self) -> None:
        self.abandoned = 0
        self._runner: _Runner | None = None
        self._exits = contextlib.ExitStack()

    async def call(self, function: Callable[[], Any]) -> Any:
        """Call a function on the loop, await there what it returns, and return or raise what comes of it.

        It sees the caller's context variables. When the caller is cancelled, the asyncio task is, too; it has
        `CANCEL_GRACE` seconds to end and is counted in `abandoned` from then on until it does.

        Raises:
            RuntimeError: another call blocks the loop; the message names it.
            BaseException: whatever the function raised.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        runner = self._running()
        token = trio.lowlevel.current_trio_token()
        context = contextvars.copy_context()
        reply: Reply[tuple[Any, BaseException | None]] = Reply()
        task: asyncio.Task[tuple[Any, BaseException | None]] | None = None
        given_up = heard = left_behind = False

        async def run() -> tuple[Any, BaseException | None]:
            if given_up or runner.stuck:  # it comes to this too late
                return None, None
            try:
                value = function()
                return await value if inspect.isawaitable(value) else value, None
            except BaseException as error:  # interrupts as well: they would end the loop
                return None, error

        def begin() -> None:
            nonlocal task
            task = runner.loop.create_task(run(), context=context)
            task.add_done_callback(ended)

        def ended(task: asyncio.Task[tuple[Any, BaseException | None]]) -> None:
            result = (None, asyncio.CancelledError()) if task.cancelled() else task.result()
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(answer, result)

        def answer(result: tuple[Any, BaseException | None]) -> None:
            reply.set(result)
            self.abandoned -= left_behind

        def cancel() -> None:
            nonlocal heard
            heard = True
            if task is not None:
                task.cancel()

        runner.waiting[reply] = cancel
        runner.loop.call_soon_threadsafe(begin)
        try:
            value, error = await reply.wait()
        except trio.Cancelled:
            given_up = True
            try:
                runner.loop.call_soon_threadsafe(cancel)
            except RuntimeError:  # the loop is closed: nothing runs there any more
                heard = True
            with trio.move_on_after(CANCEL_GRACE, shield=True), contextlib.suppress(RuntimeError):
                await reply.wait()
            if not reply.answered and not heard:
                self._replace(runner, token)
            elif not reply.answered:
                left_behind = True
                self.abandoned += 1
            raise
        finally:
            del runner.waiting[reply]
        if error is not None:
            raise error
        return value

    async def close(self) -> None:
        """Cancel what still runs on the loop and end it and its thread; one that is stuck is left behind."""
        with trio.move_on_after(CLOSE_GRACE, shield=True):
            await trio.to_thread.run_sync(self._exits.close, abandon_on_cancel=True)

    def _running(self) -> "_Runner":
        if self._runner is None or self._runner.loop.is_closed():  # an interrupt in a task of its own closes a loop
            portal = self._exits.enter_context(start_blocking_portal("asyncio"))
            self._runner = _Runner(*portal.call(lambda: (asyncio.get_running_loop(), threading.get_ident())))
        return self._runner

    def _replace(self, runner: "_Runner", token: trio.lowlevel.TrioToken) -> None:
        """Leave a stuck loop behind. What waits for it fails; it could not go on beside another loop either."""
        runner.stuck = True
        place, stack = runner.where()
        log.warning(
            "the loop of the environments for asyncio is blocked by %s; all that run on it lose their attempts, and "
            "the next get a new loop; await something instead, or call it through asyncio.to_thread\n%s",
            place,
            stack,
        )
        self._runner = None
        self.abandoned += 1

        def go_on() -> None:
            for cancel in cancels:
                cancel()
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(came_back)

        def came_back() -> None:
            self.abandoned -= 1

        cancels = list(runner.waiting.values())
        for reply in list(runner.waiting):
            reply.fail(RuntimeError(f"its asyncio loop was blocked by {place}, another call of user code"))
        runner.loop.call_soon_threadsafe(go_on)


class _Runner:
    """A loop in its thread.

    Attributes:
        waiting: replies to come, and what cancels their calls.
        stuck: it was left behind.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        self.loop = loop
        self.waiting: dict[Reply[tuple[Any, BaseException | None]], Callable[[], None]] = {}
        self.stuck = False
        self._thread = thread

    def where(self) -> tuple[str, str]:
        """What the loop is executing, and its stack."""
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            return "code that has just ended", ""
        stack = list(traceback.walk_stack(frame))
        found, line = culprit(stack)
        place = f"{found.f_code.co_qualname} at {found.f_code.co_filename}:{line}"
        return place, "".join(traceback.StackSummary.extract(reversed(stack[:20])).format()).rstrip()
