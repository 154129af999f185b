"""A Trio task beside the one that asks, which can be left behind when it does not end: a nursery would wait for ever.

Trio cannot end a task that ignores its cancellation: one that waits for a thread without `abandon_on_cancel`, sits in
a shielded scope or swallows `Cancelled`. Such a task of user code must not keep an actor. It does keep `trio.run` from
returning: who wants the process to end asks `stuck` what is left, and exits without it.
"""

import contextvars
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import trio

_left_behind: set["Aside"] = set()


class Aside:
    """A running task; the scopes around whoever starts it do not reach it.

    Args:
        function: what it runs.
        what: how `stuck` calls it.
        at_end: called when it ends, unless it was left before.

    Attributes:
        scope: cancels it.
        ended: set once it has ended, with `value` or `error`.
    """

    __slots__ = ("_at_end", "_task", "_what", "ended", "error", "scope", "value")

    def __init__(
        self, function: Callable[[], Awaitable[Any]], what: str, at_end: Callable[["Aside"], None] = lambda aside: None
    ) -> None:
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self.value: Any = None
        self.error: BaseException | None = None
        self._what = what
        self._at_end = at_end
        self._task = trio.lowlevel.spawn_system_task(self._run, function, name=what, context=contextvars.copy_context())

    def leave(self, came_back: Callable[[], None]) -> None:
        """Wait for it no longer; `came_back` is called when it ends after all."""
        self._at_end = lambda aside: came_back()
        _left_behind.add(self)

    def where(self) -> str:
        """Which of the user's functions it is in, as far as can be told."""
        try:
            frames = [frame for frame, _ in self._task.iter_await_frames()]
        except TypeError:  # an awaitable of another make
            frames = []
        for frame in reversed(frames):
            if not (frame.f_globals.get("__name__") or "").startswith(("trio.", "trouper.")):
                code = frame.f_code
                return f"{code.co_qualname} ({Path(code.co_filename).name}:{frame.f_lineno})"
        return "an unknown place"

    def __str__(self) -> str:
        return f"{self._what}, at {self.where()}"

    async def _run(self, function: Callable[[], Awaitable[Any]]) -> None:
        try:
            with self.scope:
                try:
                    self.value = await _unprotected(function)
                finally:
                    await _end_nurseries(self._task)
        except trio.Cancelled:  # the loop ends, and with it everything
            raise
        except BaseException as error:  # for whoever asked; here it would end the loop
            self.error = error
        finally:
            self.ended.set()
            _left_behind.discard(self)
            self._at_end(self)


@trio.lowlevel.disable_ki_protection
async def _unprotected(function: Callable[[], Awaitable[Any]]) -> Any:
    """Trio keeps Ctrl-C from its system tasks; user code must hear it."""
    return await function()


async def _end_nurseries(task: trio.lowlevel.Task) -> None:
    """End those that user code has left open: a system task that ends inside of one takes the loop with it."""
    while task.child_nurseries:
        nursery = task.child_nurseries[-1]
        nursery.cancel_scope.cancel()
        # All of its `__aexit__` but the end of its cancel scope, which Trio misses where ours ends.
        await nursery._nested_child_finished(None)


async def stuck(patience: float) -> list[str]:
    """What was left behind in this process and does not end, in words.

    Args:
        patience: seconds to wait for their end.
    """
    with trio.move_on_after(patience):
        for aside in tuple(_left_behind):
            await aside.ended.wait()
    return [str(aside) for aside in _left_behind]
