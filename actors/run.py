"""Runs a graph as a program: in a Trio loop of its own, with the signals that people and schedulers send.

The first SIGINT or SIGTERM asks for the graceful stop, the second cancels. Where code does not end when it is
cancelled, or never lets the event loop run, the process ends all the same: a few seconds later, or at the third signal.
Other exit codes are the caller's affair.
"""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

import trio

from trouper.actors.graph import Graph

PATIENCE = 2.0
"""Seconds that a run which was told twice has to end."""


def run(
    graph: Graph, *, clock: trio.abc.Clock | None = None, instruments: Sequence[trio.abc.Instrument] = ()
) -> signal.Signals | None:
    """Run a graph to its end.

    Args:
        graph: one that has not run yet.
        clock: the loop's clock; real time when None.
        instruments: Trio instruments.

    Returns:
        The first signal that stopped it, or None when it ended by itself.

    Raises:
        Exception: whatever `Graph.run` raises.
    """
    return trio.run(attend, graph, clock=clock, instruments=instruments)


async def attend(graph: Graph) -> signal.Signals | None:
    """Like `run`, inside a running loop. Off the main thread, where Python allows no handlers, it heeds no signals."""
    if threading.current_thread() is not threading.main_thread():
        await graph.run()
        return None
    error: Exception | None = None
    async with trio.open_nursery() as nursery:
        with _Signals(graph.stop, nursery.cancel_scope.cancel) as signals:
            try:
                await graph.run()
            # Kept, to be raised outside of the nursery: it would wrap it in a group.
            except Exception as failure:
                error = failure
            nursery.cancel_scope.cancel()
    if error is not None:
        raise error
    return signals.first


class _Signals:
    """Handlers that Python runs between two instructions, so they are heard also while code blocks the event loop.

    Args:
        stop: on the first signal.
        cancel: on the second one; what has not ended `PATIENCE` later ends with the process, as on the third.
    """

    def __init__(self, stop: Callable[[], None], cancel: Callable[[], None]) -> None:
        self.first: signal.Signals | None = None
        self._do = [stop, cancel]
        self._token = trio.lowlevel.current_trio_token()
        self._before: dict[signal.Signals, Any] = {}
        self._last_resort: threading.Timer | None = None

    def __enter__(self) -> "_Signals":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._last_resort is not None:
            self._last_resort.cancel()

    def _hear(self, number: int, frame: object) -> None:
        self.first = self.first or signal.Signals(number)
        if not self._do:
            _leave(self.first)
        self._token.run_sync_soon(self._do.pop(0))
        if not self._do:
            self._last_resort = threading.Timer(PATIENCE, _leave, [self.first])
            self._last_resort.daemon = True
            self._last_resort.start()


def _leave(number: signal.Signals) -> None:
    message = f"trouper: {number.name} came again, and some code does not end when it is cancelled: leaving it\n"
    os.write(2, message.encode())
    os._exit(128 + number)
