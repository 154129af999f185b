"""The source: gives every training slot a task, and its group the attempts.

A slot's task is a pure function of its draw number. The source knows which draw each open slot has; a checkpoint
keeps that, so a resumed run gives the same slots the same tasks.
"""

import heapq

from msgspec import Struct

from trouper.actors.pacer import Pacer
from trouper.channels import Attempt, Outcome, Sender, Void
from trouper.envs import Tasks


class SlotDraw(Struct, frozen=True, array_like=True):
    """What a slot that is not yet trained had been given.

    Attributes:
        slot: the place in the training order.
        draw: the number of its task; -1 where its group was dropped and it was not given another one yet.
        redraws: how often it had been given another task.
    """

    slot: int
    draw: int
    redraws: int


class SourcePosition(Struct, frozen=True):
    """Where a source stands, as a checkpoint keeps it.

    Attributes:
        next_draw: the first task that no slot was given yet.
        open: the slots that were given a task and are not trained.
    """

    next_draw: int
    open: tuple[SlotDraw, ...]


class Source:
    """Draws tasks for slots, as the pacer admits them.

    Args:
        tasks: the stream; `task(draw)` is None beyond its end.
        pacer: which slot is next.
        num_generations: members of a group.
        run_seed: becomes part of every attempt's seed.
        resumed: where an earlier life stood.
    """

    def __init__(
        self,
        tasks: Tasks,
        pacer: Pacer,
        *,
        num_generations: int,
        run_seed: int,
        resumed: SourcePosition | None = None,
    ) -> None:
        self._tasks = tasks
        self._pacer = pacer
        self._num_generations = num_generations
        self._run_seed = run_seed
        self._next_draw = resumed.next_draw if resumed else 0
        self._given: dict[int, int] = {open_.slot: open_.draw for open_ in resumed.open} if resumed else {}
        # Slots of the earlier life whose attempts have to be played again, with the draws they had.
        self._again = {slot: draw for slot, draw in self._given.items() if draw >= 0}
        self._order: list[int] = sorted(self._given)

    def forget(self, first_slot: int) -> None:
        """The slots before this one are trained."""
        while self._order and self._order[0] < first_slot:
            del self._given[heapq.heappop(self._order)]

    def position(self, first_slot: int) -> SourcePosition:
        """What a checkpoint of the step that begins with `first_slot` has to keep."""
        self.forget(first_slot)
        pacer = self._pacer
        return SourcePosition(
            next_draw=self._next_draw,
            open=tuple(
                SlotDraw(slot, -1 if pacer.awaits_task(slot) else draw, pacer.redraws(slot))
                for slot, draw in sorted(self._given.items())
            ),
        )

    async def run(self, outbox: Sender[Attempt], voids: Sender[Outcome]) -> None:
        """Send a group's attempts for each admitted slot until the pacer has no more."""
        while (slot := await self._pacer.acquire()) is not None:
            draw = self._again.pop(slot, self._next_draw)
            task = self._tasks.task(draw)
            fresh = slot not in self._given
            if task is None:
                if not self._pacer.seal(slot if fresh else None):
                    await voids.send(Void(slot, "end_of_data"))
                continue
            if fresh:
                heapq.heappush(self._order, slot)
            self._given[slot] = draw
            self._next_draw = max(self._next_draw, draw + 1)
            for member in range(self._num_generations):
                await outbox.send(Attempt(slot, draw, member, 0, self._run_seed, task))
