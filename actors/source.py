"""The source: gives every training slot a task, and its group the attempts.

A slot's task is a pure function of its draw number. The source knows which draw each open slot has; ledger and
checkpoint keep that, so a resumed run gives the same slots the same tasks.
"""

import heapq

from msgspec import Struct

from trouper.actors.ledger import Ledger, SlotDraw
from trouper.actors.pacer import Pacer
from trouper.actors.quarantine import Quarantine
from trouper.channels import Attempt, HopelessRun, Outcome, Sender, Task, Void
from trouper.envs import Tasks

MOST_SKIPPED = 10_000
"""Draws in a row whose tasks are all quarantined before the source gives up."""


class SourcePosition(Struct, frozen=True):
    """Where a source stands, as a checkpoint keeps it.

    Attributes:
        next_draw: the first task that no slot was given yet.
        open: the slots that were given a task and are not trained.
        used: later draws that were given away all the same.
        quarantined: causes by the ids of the tasks that are not drawn any more.
    """

    next_draw: int
    open: tuple[SlotDraw, ...]
    used: tuple[int, ...] = ()
    quarantined: dict[str, str] = {}


BEGINNING = SourcePosition(next_draw=0, open=())
"""Where a source stands that has drawn nothing."""


class Source:
    """Draws tasks for slots, as the pacer admits them.

    Args:
        tasks: the stream; `task(draw)` is None beyond its end.
        pacer: which slot is next.
        quarantine: which tasks are passed over.
        ledger: remembers which slot was given which draw.
        num_generations: members of a group.
        run_seed: becomes part of every attempt's seed.
        resumed: where an earlier life stood.
    """

    def __init__(
        self,
        tasks: Tasks,
        pacer: Pacer,
        quarantine: Quarantine,
        ledger: Ledger,
        *,
        num_generations: int,
        run_seed: int,
        resumed: SourcePosition = BEGINNING,
    ) -> None:
        self._tasks = tasks
        self._pacer = pacer
        self._quarantine = quarantine
        self._ledger = ledger
        self._num_generations = num_generations
        self._run_seed = run_seed
        self._first_unused = resumed.next_draw
        self._used = set(resumed.used)  # at or beyond the first unused one
        self._given: dict[int, int] = {open_.slot: open_.draw for open_ in resumed.open}
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
            next_draw=self._unused(),
            open=tuple(
                SlotDraw(slot, -1 if pacer.awaits_task(slot) else draw, pacer.redraws(slot))
                for slot, draw in sorted(self._given.items())
            ),
            used=tuple(sorted(self._used)),
            quarantined=dict(self._quarantine.causes),
        )

    def first_played(self, slot: int) -> int:
        """The lowest slot, up to this one, whose attempts are out."""
        pacer = self._pacer
        for lower in range(pacer.first_open, slot):
            if not pacer.has_ended(lower) and not pacer.awaits_task(lower) and self._given.get(lower, -1) >= 0:
                return lower
        return slot

    def exchange(self, slot: int, other: int) -> SlotDraw:
        """Two slots whose attempts are out change tasks.

        Returns:
            What `other` has now.
        """
        given = self._given
        given[slot], given[other] = given[other], given[slot]
        return SlotDraw(other, given[other], self._pacer.redraws(other))

    async def run(self, outbox: Sender[Attempt], voids: Sender[Outcome]) -> None:
        """Send a group's attempts for each admitted slot until the pacer has no more."""
        while (slot := await self._pacer.acquire()) is not None:
            draw, task = self._draw(slot)
            fresh = slot not in self._given
            if task is None:
                if not fresh:
                    self._given[slot] = -1  # the draw it had was dropped
                if not self._pacer.seal(slot if fresh else None):
                    await voids.send(Void(slot, "end_of_data"))
                continue
            if fresh:
                heapq.heappush(self._order, slot)
            self._given[slot] = draw
            self._use(draw)
            self._ledger.drew(SlotDraw(slot, draw, self._pacer.redraws(slot)))
            for member in range(self._num_generations):
                await outbox.send(Attempt(slot, draw, member, 0, self._run_seed, task))

    def _draw(self, slot: int) -> tuple[int, Task | None]:
        draw = self._again.pop(slot, -1)
        for _ in range(MOST_SKIPPED):
            draw = self._unused() if draw < 0 else draw
            task = self._tasks.task(draw)
            if task is None or task.id not in self._quarantine:
                return draw, task
            self._use(draw)
            draw = -1
        cause = next(iter(self._quarantine.causes.values()))
        raise HopelessRun(
            f"{MOST_SKIPPED} draws in a row gave tasks that are quarantined ({len(self._quarantine.causes)} are), "
            f"since every member of their groups was lost; first cause: {cause}. Mend the environment, or raise "
            "rollout.quarantine_after"
        )

    def _use(self, draw: int) -> None:
        if draw >= self._first_unused:
            self._used.add(draw)

    def _unused(self) -> int:
        while self._first_unused in self._used:
            self._used.remove(self._first_unused)
            self._first_unused += 1
        return self._first_unused
