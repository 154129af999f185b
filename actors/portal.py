"""One asyncio loop in a thread of its own: where user code runs that is written for asyncio, called from Trio.

Knows neither environments nor limits. anyio starts and ends the loop; the calls themselves are plain asyncio tasks,
because anyio's scopes cancel a task again at every await, and code for asyncio expects to be cancelled once.
"""

import asyncio
import contextlib
import contextvars
import inspect
from collections.abc import Callable
from typing import Any

import trio
from anyio.from_thread import start_blocking_portal

from trouper.channels import Reply

CANCEL_GRACE = 1.0
"""Seconds a cancelled call has for its `finally` blocks before it is left behind."""

CLOSE_GRACE = 3.0
"""Seconds the loop has to end; after that its thread, a daemon, is left to the end of the process."""


class AsyncioPortal:
    """Calls functions on an asyncio loop; the first call starts it, and so does the first one after it died.

    Attributes:
        abandoned: calls that were cancelled and go on all the same.
    """

    def __init__(self) -> None:
        self.abandoned = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._exits = contextlib.ExitStack()

    async def call(self, function: Callable[[], Any]) -> Any:
        """Call a function on the loop, await there what it returns, and return or raise what comes of it.

        It sees the caller's context variables. When the caller is cancelled, the asyncio task is, too; it has
        `CANCEL_GRACE` seconds to end and is counted in `abandoned` from then on until it does.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        loop = self._running()
        token = trio.lowlevel.current_trio_token()
        context = contextvars.copy_context()
        reply: Reply[tuple[Any, BaseException | None]] = Reply()
        task: asyncio.Task[tuple[Any, BaseException | None]] | None = None
        given_up = left_behind = False

        async def run() -> tuple[Any, BaseException | None]:
            if given_up:  # a loop that was stuck comes to this too late
                return None, None
            try:
                value = function()
                return await value if inspect.isawaitable(value) else value, None
            except BaseException as error:  # interrupts as well: they would end the loop, and are for the run to hear
                return None, error

        def begin() -> None:
            nonlocal task
            task = loop.create_task(run(), context=context)
            task.add_done_callback(ended)

        def ended(task: asyncio.Task[tuple[Any, BaseException | None]]) -> None:
            result = (None, asyncio.CancelledError()) if task.cancelled() else task.result()
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(answer, result)

        def answer(result: tuple[Any, BaseException | None]) -> None:
            reply.set(result)
            self.abandoned -= left_behind

        def cancel() -> None:
            if task is not None:
                task.cancel()

        loop.call_soon_threadsafe(begin)
        try:
            value, error = await reply.wait()
        except trio.Cancelled:
            given_up = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing runs there any more
                loop.call_soon_threadsafe(cancel)
            with trio.move_on_after(CANCEL_GRACE, shield=True):
                await reply.wait()
            left_behind = not reply.answered
            self.abandoned += left_behind
            raise
        if error is not None:
            raise error
        return value

    async def close(self) -> None:
        """Cancel what still runs on the loop and end it and its thread; one that is stuck is left behind."""
        with trio.move_on_after(CLOSE_GRACE, shield=True):
            await trio.to_thread.run_sync(self._exits.close, abandon_on_cancel=True)

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._loop.is_closed():  # an interrupt in a task of its own closes a loop
            portal = self._exits.enter_context(start_blocking_portal("asyncio"))
            self._loop = portal.call(asyncio.get_running_loop)
        return self._loop
