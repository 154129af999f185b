"""The admission rule: which training slot may be started now, so that no trained token is too stale.

A training slot `k` is a place in the training order: step `t` trains slots `[t * g, (t + 1) * g)`. Slot `k` is trained
at step `k // g` and admitted only once every live sampler holds weights of step `k // g - max_staleness` or newer, so
whatever is trained obeys the bound, however late it comes, and nothing is thrown away for being late. Where late groups
are dropped instead, admission is the same, but a slot's group may be trained in an earlier slot: see `Grouper`.

Knows numbers only: no tasks, episodes or weights. All but `acquire` is non-blocking, so every edge back to it is.
"""

import heapq
from collections.abc import Collection, Mapping

import trio

from trouper.channels import ConfigError


class Pacer:
    """Hands out training slots, in order, as fast as the staleness bound allows.

    Args:
        groups_per_step: g, slots that one optimizer step trains.
        max_staleness: s, most optimizer steps between the weights a token is sampled under and the step it trains.
        max_steps: the number of the last step, or None to go on until the data ends.
        max_redraws: how often a slot may be reopened with another task.
        weight_sync_steps: optimizer steps between two publications of weights.
        first_step: steps already trained, when a run resumes.
        attested: whether the samplers hold that step's weights already; if not, nothing is admitted before they do.

    Attributes:
        groups_per_step: g.
        first_step: as given.
        version: step number of the newest weights that every live sampler has attested.
        total: slots there are to train, or None while unknown.

    Raises:
        ConfigError: a number is out of range, or the weights come too seldom for the staleness bound.
    """

    def __init__(
        self,
        groups_per_step: int,
        max_staleness: int,
        max_steps: int | None,
        max_redraws: int,
        weight_sync_steps: int,
        first_step: int = 0,
        attested: bool = True,
    ) -> None:
        for name, value, least in (
            ("groups_per_step", groups_per_step, 1),
            ("max_staleness", max_staleness, 0),
            ("max_steps", max_steps, 0),
            ("max_redraws", max_redraws, 0),
            ("weight_sync_steps", weight_sync_steps, 1),
            ("first_step", first_step, 0),
        ):
            if value is not None and value < least:
                raise ConfigError(f"{name} = {value}; it must be {least} or more")
        if weight_sync_steps - 1 > max_staleness:
            raise ConfigError(
                f"weight_sync_steps = {weight_sync_steps} needs max_staleness >= {weight_sync_steps - 1}, and it is "
                f"{max_staleness}: the last step before a sync trains tokens whose weights are {weight_sync_steps} - 1 "
                f"steps old. Set weight_sync_steps = {max_staleness + 1} or max_staleness = {weight_sync_steps - 1}"
            )
        self.first_step = first_step
        self.version = first_step if attested else first_step - max_staleness - 1
        self.total = None if max_steps is None else max_steps * groups_per_step
        self.groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._max_redraws = max_redraws
        self._next = first_step * groups_per_step
        self._reopened: list[int] = []
        self._redraws: dict[int, int] = {}
        self._all_closed_below = self._next
        self._closed_above: set[int] = set()
        self._restored_to = -1
        self._sealed = False
        self._stopped = False
        self._waiting = trio.lowlevel.ParkingLot()

    @property
    def closed(self) -> int:
        """Slots that have ended, trained or void, those before `first_step` included."""
        return self._all_closed_below + len(self._closed_above)

    @property
    def admitted(self) -> int:
        """Slots handed out so far, those before `first_step` included."""
        return self._next

    @property
    def first_open(self) -> int:
        """The lowest slot that has not ended."""
        return self._all_closed_below

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped

    def size(self, step: int) -> int:
        """How many slots a step trains: g, less in a short last step, 0 beyond it."""
        if self.total is None:
            return self.groups_per_step
        return max(0, min(self.groups_per_step, self.total - step * self.groups_per_step))

    def redraws(self, slot: int) -> int:
        """How often an open slot was reopened; 0 once it is closed."""
        return self._redraws.get(slot, 0)

    def has_ended(self, slot: int) -> bool:
        """Whether a slot was trained or is void."""
        return slot < self._all_closed_below or slot in self._closed_above

    def awaits_task(self, slot: int) -> bool:
        """Whether a slot was reopened and not acquired again."""
        return slot in self._reopened

    def allows(self, slot: int, version: int) -> bool:
        """Whether a token that was sampled under weights of step `version` is fresh enough to be trained in a slot."""
        return slot // self.groups_per_step - version <= self._max_staleness

    async def acquire(self) -> int | None:
        """The next slot to start: the lowest reopened one, else the next in order once the bound allows it.

        Returns:
            The slot, or None when all slots are closed or the pacer was stopped.
        """
        await trio.lowlevel.checkpoint()
        while True:
            if self._stopped:
                return None
            if self._reopened:
                return heapq.heappop(self._reopened)
            if self.total is not None and self.closed >= self.total:
                return None
            if self._may_admit():
                self._next += 1
                if self._next - 1 not in self._closed_above:  # else it had ended before this life began
                    return self._next - 1
                continue
            await self._waiting.park()

    def reopen(self, slot: int, *, late: bool = False) -> bool:
        """A slot's group was dropped; start the slot again with another task.

        Args:
            slot: which one.
            late: it was dropped for nothing but that: this uses up no redraw.

        Returns:
            False when its redraws are used up or the data has ended: the caller then closes the slot.
        """
        self._refuse_unless_open(slot)
        if self._sealed or (not late and self.redraws(slot) >= self._max_redraws):
            return False
        if not late:
            self._redraws[slot] = self.redraws(slot) + 1
        heapq.heappush(self._reopened, slot)
        self._waiting.unpark_all()
        return True

    def close(self, slot: int) -> None:
        """A slot has ended, with a group to train or void.

        Raises:
            ValueError: it was never admitted, or has ended before.
        """
        self._refuse_unless_open(slot)
        self._redraws.pop(slot, None)
        self._closed_above.add(slot)
        self._move_on()
        self._waiting.unpark_all()

    def attest(self, step: int) -> None:
        """Every live sampler holds weights of this step or newer; an older number than before changes nothing."""
        self.version = max(self.version, step)
        self._waiting.unpark_all()

    def seal(self, unused: int | None) -> bool:
        """The data has ended: there are no more slots than were admitted.

        Args:
            unused: a slot that was acquired and for which there is no task.

        Returns:
            Whether that slot was never used and is taken back. If not, the caller sends it on as void.
        """
        # An earlier life may have got further than this one has come until now.
        beyond = max(self._restored_to, *self._closed_above, -1)
        last = unused is not None and unused == self._next - 1 > beyond
        taken_back = last and not self._sealed and not self.redraws(self._next - 1)
        if taken_back:
            self._next -= 1
        self._sealed = True
        self.total = max(self._next, beyond + 1)
        self._waiting.unpark_all()
        return taken_back

    def stop(self) -> None:
        """Admit nothing more: `acquire` returns None from now on. Open slots stay open."""
        self._stopped = True
        self._waiting.unpark_all()

    def restore(self, redraws: Mapping[int, int], ended: Collection[int] = ()) -> None:
        """After a resume, remember how often the slots that were open had been reopened, and which have ended.

        Args:
            redraws: by slot, of all that were open.
            ended: slots whose groups an earlier life had completed; they are not handed out again.

        Raises:
            ValueError: a slot lies before `first_step`, or something was admitted already.
        """
        for slot in (*redraws, *ended):
            if slot < self._next:
                raise ValueError(
                    f"slot {slot} cannot be restored: slots below {self._next} are closed or admitted; restore the "
                    "slots of a checkpoint right after building the pacer with its step"
                )
        self._restored_to = max((*redraws, *ended), default=-1)
        self._redraws.update({slot: count for slot, count in redraws.items() if count and slot not in ended})
        self._closed_above.update(ended)
        self._move_on()

    def _move_on(self) -> None:
        while self._all_closed_below in self._closed_above:
            self._closed_above.remove(self._all_closed_below)
            self._all_closed_below += 1
        self._next = max(self._next, self._all_closed_below)

    def _may_admit(self) -> bool:
        return (self.total is None or self._next < self.total) and (
            self._next // self.groups_per_step <= self.version + self._max_staleness
        )

    def _refuse_unless_open(self, slot: int) -> None:
        if not self._all_closed_below <= slot < self._next or slot in self._closed_above:
            state = "was never admitted" if slot >= self._next else "has ended before"
            raise ValueError(f"slot {slot} {state}; a slot ends exactly once")
        if self.awaits_task(slot):
            raise ValueError(f"slot {slot} was reopened and not acquired again; nobody can end it now")
