"""Runs a graph as a program: in a Trio loop of its own, with the signals that people and schedulers send.

The first SIGINT or SIGTERM asks for the graceful stop, the second cancels, the third is Python's own. Exit codes are
the caller's affair.
"""

import signal
import threading
from collections.abc import Sequence

import trio

from trouper.actors.graph import Graph


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
    stopped_by: signal.Signals | None = None
    error: Exception | None = None

    async def listen(*, task_status: "trio.TaskStatus[None]") -> None:
        nonlocal stopped_by
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                if stopped_by is not None:
                    break
                stopped_by = signal.Signals(number)
                graph.stop()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        await nursery.start(listen)
        try:
            await graph.run()
        # Kept, to be raised outside of the nursery: it would wrap it in a group.
        except Exception as failure:
            error = failure
        nursery.cancel_scope.cancel()
    if error is not None:
        raise error
    return stopped_by
