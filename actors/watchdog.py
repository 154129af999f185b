"""The watchdog of a graph: ends a run that can never go on by itself, and names who waits for whom.

A stall is a state in which every task of the graph waits on a channel, lock, reply or slot of another one and no
pending deadline can end it. It can never end by itself, so it is found exactly and needs no threshold: however slow a
tool is, its deadline is pending, or it is waited for by a thread, a socket or a process.

Knows when to look and what to do then; `trouper.actors.wait_graph` knows how to look.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

import trio

from trouper.actors.heartbeat import PERIOD, Heartbeat
from trouper.actors.wait_graph import Picture, WaitGraph
from trouper.actors.wiring import Ends
from trouper.channels import Stalled

log = logging.getLogger(__name__)


class Watchdog:
    """Watches one run of a graph.

    Every timer of the loop counts as a pending deadline, also one outside of the graph, since whoever wakes may do
    anything. A task that wakes at regular times therefore keeps the watchdog from finding a stall, and an alarm of
    `trouper.actors.alarms` delays it until it has rung: it outlives the call that it was set for.

    Args:
        name: the graph's.
        actors: by the name under which each runs, its channel ends.
        links: (source, target, label) of the graph's edges that never block.
        heartbeat: is beaten, so that code that blocks the loop is found too.
        interval: seconds between two looks; a stall is found within two of them, once no timer is left.
        note: told what a person should read.
    """

    def __init__(
        self,
        name: str,
        actors: Mapping[str, Ends],
        links: Sequence[tuple[str, str, str]],
        heartbeat: Heartbeat,
        *,
        interval: float = 10.0,
        note: Callable[[str], None] = log.warning,
    ) -> None:
        self._name = name
        self._waits = WaitGraph(actors, links)
        self._heartbeat = heartbeat
        self._interval = interval
        self._note = note
        self._told: list[str] = []
        self._stall = ""

    async def guard(self, run: Callable[[], Awaitable[None]], stop: Callable[[], None]) -> None:
        """Run the actors of the graph under watch.

        A stall asks them to stop, so that what was reached is saved; one that remains then is cancelled.

        Args:
            run: runs them to their end.
            stop: asks them to end.

        Raises:
            Stalled: they waited for each other; what they raised while they ended is its cause.
            Exception: whatever `run` raised.
        """
        error: Exception | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, nursery, stop, name=f"{self._name}/watchdog")
                try:
                    await run()
                except Exception as failure:
                    error = failure  # raised below: the nursery would wrap it
                nursery.cancel_scope.cancel()
        except* Exception as failures:
            error = failures
        if self._stall:
            raise Stalled(self._stall) from error
        if error is not None:
            raise error

    async def _watch(self, nursery: trio.Nursery, stop: Callable[[], None]) -> None:
        with self._heartbeat:
            while True:
                await self._pause()
                if _deadline_pending():
                    continue
                picture = self._waits.look(nursery)
                if picture.stalled == "no":
                    continue
                # A task that is about to run still looks as if it waited. If nobody takes a step until the next
                # look, nobody was, and no thread's result was on its way either.
                with _Steps() as steps:
                    await self._pause()
                if steps.taken or _deadline_pending():
                    continue
                if picture.stalled == "perhaps":
                    self._suspect(picture)
                elif not self._stall:
                    self._stall = self._report(picture)
                    self._note(self._stall)
                    stop()
                else:
                    self._note(self._report(picture))
                    nursery.cancel_scope.cancel()

    async def _pause(self) -> None:
        end = trio.current_time() + self._interval
        while (left := end - trio.current_time()) > 0:
            await trio.sleep(min(left, PERIOD) if self._heartbeat.real else left)
            self._heartbeat.beat()

    def _suspect(self, picture: Picture) -> None:
        """Not certain enough to end the run; said once for each such state."""
        if self._told == picture.lines():
            return
        self._told = picture.lines()
        text = (
            f"graph {self._name!r} may be stalled: no task has moved for {self._interval:g} s and no deadline is "
            "pending, but an event that somebody waits for may be set from another thread. If it is not, the run "
            f"hangs; give such a wait a deadline\n{_indented(picture)}"
        )
        self._note(text)

    def _report(self, picture: Picture) -> str:
        return (
            f"graph {self._name!r} is stalled: every task waits for another one, none has moved for "
            f"{self._interval:g} s, and no deadline is pending that could end it. Somebody below has not sent, "
            f"released or answered what the others wait for\n{_indented(picture)}"
        )


class _Steps(trio.abc.Instrument):
    """Whether any task took a step, other than the one that asks."""

    def __enter__(self) -> "_Steps":
        self.taken = False
        self._asking = trio.lowlevel.current_task()
        trio.lowlevel.add_instrument(self)
        return self

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is not self._asking:
            self.taken = True
            trio.lowlevel.remove_instrument(self)

    def __exit__(self, *exc: object) -> None:
        if not self.taken:
            trio.lowlevel.remove_instrument(self)


def _deadline_pending() -> bool:
    """Whether a timer other than the caller's own will go off before one that ends the caller too."""
    pending = trio.lowlevel.current_statistics().seconds_to_next_deadline
    return pending < trio.current_effective_deadline() - trio.current_time()


def _indented(picture: Picture) -> str:
    return "\n".join(f"  {line}" for line in (*picture.lines(trio.current_time()), picture.path()))
