"""The bookkeeping of the engine's slots: who sits where, what is cached, and what can be reused.

Plain NumPy on the host; knows neither JAX nor models. A slot holds one conversation's token ids and says for how many
of them the device has keys and values. The engine carries out on the device what is planned here (copies, prefill
rows, decode chunks) in the order it is planned.
"""

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trouper.channels import Turn
from trouper.learner.control import CONTROL_WIDTH, Column, Copy, Fill, allot, control_row
from trouper.learner.request import Request, Version


def _worthwhile(missing: int) -> int:
    """How many cached tokens are worth a copy: a few are not worth waiting for, unless little is missing."""
    return max(1, min(16, missing // 4))


# What a slot is doing. Plain numbers, as they are compared in arrays: `phase >= FILLING` runs a request.
FREE = 0  # no conversation; what is cached may still serve as a prefix until the slot is taken
IDLE = 1  # keeps a conversation between its turns
FILLING = 2  # its request's context is not cached yet
LIVE = 3  # decodes


class Admission(NamedTuple):
    """A request has got a slot; the copies are to be made before anything is prefilled."""

    slot: int
    copies: list[Copy]


class Slots:
    """A fixed number of slots of a fixed length.

    Args:
        slots: how many, `S`.
        length: cache positions of each, `C`.

    Attributes:
        control: int32 [S, CONTROL_WIDTH], what the device needs to decode; floats as their bits. A slot that does not
            decode has position `C`.
        phase: int8 [S], one of `FREE`, `IDLE`, `FILLING`, `LIVE`.
        known: int32 [S], how many token ids the slot holds.
        resident: int32 [S], for how many of them keys and values are cached.
        reused: tokens so far that did not have to be prefilled.
        evictions: conversations so far that lost their slot to another.
    """

    def __init__(self, slots: int, length: int) -> None:
        self.count, self.length = slots, length
        self.control = np.zeros((slots, CONTROL_WIDTH), np.int32)
        self.control[:, Column.POSITION] = length
        self.phase = np.zeros(slots, np.int8)
        self.known = np.zeros(slots, np.int32)
        self.resident = np.zeros(slots, np.int32)
        self.reused = self.evictions = 0
        self._prompt = np.zeros(slots, np.int32)
        self._history = np.zeros((slots, length), np.int32)
        self._logprobs = np.zeros((slots, length), np.float32)
        self._stamps = np.zeros((slots, length), np.int32)
        # The oldest weights that any cached key or value of the slot was made under.
        self._life = np.zeros(slots, np.int64)
        self._step = np.zeros(slots, np.int64)
        # That step when the present turn's first token was sampled: no later token attends to anything older.
        self._attended = np.zeros(slots, np.int64)
        # A slot that waits for another to hold a prefix it shares; -1 waits for nobody.
        self._source = np.full(slots, -1, np.int32)
        self._shared = np.zeros(slots, np.int32)
        # Grows with every use: orders requests by admission, and idle conversations by when they were last used.
        self._ticket = np.zeros(slots, np.int64)
        self._clock = 0
        self._wanted = np.zeros(slots, np.bool_)
        self._orphans: set[int] = set()
        self._conversations: dict[Hashable, int] = {}
        self._keys: list[Hashable] = [None] * slots
        self._requests: list[Request | None] = [None] * slots

    def running(self) -> NDArray[np.intp]:
        """The slots that fill or decode, in order of admission."""
        slots = np.flatnonzero(self.phase >= FILLING)
        return slots[np.argsort(self._ticket[slots])]

    def live(self) -> NDArray[np.intp]:
        """The slots that decode."""
        return np.flatnonzero(self.phase == LIVE)

    def needs_prefill(self, first: Request | None) -> bool:
        """Whether a slot's context is not cached yet, or `admit` has a slot for the first request that waits."""
        filling = bool((self.phase == FILLING).any())
        if filling or first is None:
            return filling
        own = self._conversations.get(first.conversation)
        return bool((self.phase < FILLING).any()) if own is None else not self.runs(own)

    def runs(self, slot: int) -> bool:
        """Whether a slot fills or decodes."""
        return bool(self.phase[slot] >= FILLING)

    def slot_of(self, conversation: Hashable) -> int | None:
        """Where a conversation is kept, if it is."""
        return self._conversations.get(conversation)

    def request(self, slot: int) -> Request:
        """What a running slot works on."""
        request = self._requests[slot]
        assert request is not None
        return request

    def want(self, conversation: Hashable) -> None:
        """A request of this conversation waits: drop others first."""
        slot = self._conversations.get(conversation)
        if slot is not None:
            self._wanted[slot] = True

    def unwant(self, conversation: Hashable) -> None:
        """The request of this conversation waits no more."""
        slot = self._conversations.get(conversation)
        if slot is not None:
            self._wanted[slot] = False

    # ---------------------------------------------------------------- admission

    def replan(self, version: Version) -> list[Copy]:
        """Find prefixes anew for slots whose source was lost; call before admitting others."""
        copies: list[Copy] = []
        for slot in sorted(self._orphans, key=lambda slot: int(self._ticket[slot])):
            if self.phase[slot] == FILLING:
                self._plan(slot, version, copies)
        self._orphans.clear()
        return copies

    def admit(self, request: Request, version: Version) -> Admission | None:
        """Give a request a slot: its conversation's own, a free one, or that of the least recently used idle one.

        Returns:
            None when every slot runs, or the conversation's own still does.
        """
        tokens, n = request.tokens, len(request.tokens)
        own = self._conversations.get(request.conversation)
        slot = self._vacate(tokens, version) if own is None else own
        if slot is None or self.runs(slot):
            return None
        # All but the last token are cached; the first decode step feeds that one.
        common = min(int(self.resident[slot]), n - 1)
        if own is None and not self._made_under(slot, version):
            common = 0
        same = self._history[slot, :common] == tokens[:common]
        appended = bool(own is not None and common and same.all())
        if not appended and not same.all():
            common = int(same.argmin())
        self._history[slot, common:n] = tokens[common:]
        self.known[slot] = self._prompt[slot] = n
        self.resident[slot] = common
        if common == 0:
            self._life[slot], self._step[slot] = version
        self.phase[slot] = FILLING
        self._wanted[slot] = False
        self._ticket[slot] = self._tick()
        self._conversations[request.conversation] = slot
        self._keys[slot] = request.conversation
        self._requests[slot] = request
        self.control[slot] = control_row(request, self.length)
        self.reused += common
        copies: list[Copy] = []
        if not appended:  # a conversation that just goes on has all there is
            self._plan(slot, version, copies)
        return Admission(slot, copies)

    def _vacate(self, tokens: NDArray[np.int32], version: Version) -> int | None:
        """A slot for a conversation that has none."""
        free = np.flatnonzero(self.phase == FREE)
        if free.size:
            usable = (self._life[free] == version[0]) & (self._step[free] == version[1])
            lengths = np.where(usable, self._common(free, tokens[:-1], self.resident[free]), 0)
            best = int(lengths.argmax())
            if lengths[best] >= _worthwhile(len(tokens) - 1):
                return int(free[best])
            return int(free[self._ticket[free].argmin()])
        idle = np.flatnonzero(self.phase == IDLE)
        if not idle.size:
            return None
        unwanted = idle[~self._wanted[idle]]
        idle = unwanted if unwanted.size else idle
        slot = int(idle[self._ticket[idle].argmin()])
        self.evictions += 1
        self._forget(slot)
        return slot

    def _plan(self, slot: int, version: Version, copies: list[Copy]) -> None:
        """Look for a slot that holds, or will soon hold, more of the context than the slot itself does."""
        own, end = int(self.resident[slot]), int(self.known[slot]) - 1
        least = own + _worthwhile(end - own)
        if end < least:
            return
        filling = self.phase == FILLING
        held = np.where(filling, self.known - 1, self.resident)
        # Waiting only for slots admitted earlier leaves no way to wait in a circle.
        fits = (held >= least) & (self._life == version[0]) & (self._step == version[1])
        fits &= ~filling | (self._ticket < self._ticket[slot])
        fits[slot] = False
        candidates = np.flatnonzero(fits)
        if not candidates.size:
            return
        lengths = self._common(candidates, self._history[slot, :end], held[candidates])
        longest = lengths.max()
        if longest < least:
            return
        best = candidates[lengths == longest]
        ready = best[self.resident[best] >= longest]
        source, shared = int(ready[0] if ready.size else best[self._ticket[best].argmin()]), int(longest)
        self._source[slot], self._shared[slot] = source, shared
        if ready.size:
            if self.phase[source] < FILLING:
                self._ticket[source] = self._tick()
            copies.append(self._copied(slot))

    def _common(
        self, candidates: NDArray[np.intp], tokens: NDArray[np.int32], held: NDArray[np.int32]
    ) -> NDArray[np.int64]:
        """Lengths of the prefixes that candidates share with the tokens, of what they hold."""
        if not len(tokens):
            return np.zeros(len(candidates), np.int64)
        differ = self._history[candidates, : len(tokens)] != tokens
        first = np.where(differ.any(axis=1), differ.argmax(axis=1), len(tokens))
        return np.minimum(first, held)

    def _copied(self, slot: int) -> Copy:
        """Note that a slot has what it waited for."""
        source, shared = int(self._source[slot]), int(self._shared[slot])
        self.reused += shared - int(self.resident[slot])
        self.resident[slot] = shared
        self._life[slot], self._step[slot] = self._life[source], self._step[source]
        self._source[slot] = -1
        return Copy(source, slot, shared)

    def _made_under(self, slot: int, version: Version) -> bool:
        return bool(self._life[slot] == version[0] and self._step[slot] == version[1])

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    # ---------------------------------------------------------------- prefill

    def fill(self, rows: int, widths: tuple[int, ...]) -> Fill | None:
        """The next prefill call, or None where nothing is to be prefilled.

        Every slot gets a row before any gets a second one, so a long context does not hold up short ones.

        Args:
            rows: of the call, `R`.
            widths: how many tokens a row may have, `T`, ascending. A call costs what its shape costs, however little
                is in it: the widest is taken that is at least half as full as a narrower one would be.
        """
        slots = np.flatnonzero((self.phase == FILLING) & (self._source < 0) & (self.resident < self.known - 1))
        if not slots.size:
            return None
        slots = slots[np.argsort(self._ticket[slots])]
        missing = self.known[slots] - 1 - self.resident[slots]
        width, count, given = 0, 0, missing
        for candidate in widths:
            allotted = allot(-(-missing // candidate), rows)
            filled = int(np.minimum(allotted * candidate, missing).sum())
            if 2 * filled * width >= count * candidate:
                width, count, given = candidate, filled, allotted
        used = int(given.sum())
        owner = np.zeros(rows, np.int32)
        owner[:used] = np.repeat(slots, given)
        nth = np.arange(used) - np.repeat(np.cumsum(given) - given, given)
        starts = np.full(rows, self.length)
        starts[:used] = self.resident[owner[:used]] + nth * width
        ends = np.zeros(rows, np.int32)
        ends[:used] = np.minimum(starts[:used] + width, self.known[owner[:used]] - 1)
        positions = (starts[:, None] + np.arange(width)).astype(np.int32)
        positions[positions >= ends[:, None]] = self.length
        tokens: NDArray[np.int32] = self._history[owner[:, None], np.minimum(positions, self.length - 1)]
        reach = np.minimum(self.resident[slots] + given * width, self.known[slots] - 1)
        self.resident[slots] = reach
        return Fill(owner, tokens, positions, count, int(reach.max()))

    def follow(self) -> list[Copy]:
        """Copies for slots whose source has come to hold what they share."""
        waiting = np.flatnonzero(self._source >= 0)
        # In order of admission: one that has just been copied to may be what the next one waited for.
        return [
            self._copied(int(slot))
            for slot in waiting[np.argsort(self._ticket[waiting])]
            if self.resident[self._source[slot]] >= self._shared[slot]
        ]

    def go_live(self) -> None:
        """Let every slot decode whose context is cached."""
        ready = np.flatnonzero((self.phase == FILLING) & (self._source < 0) & (self.resident == self.known - 1))
        self.phase[ready] = LIVE
        last = self.known[ready] - 1
        self.control[ready, Column.TOKEN] = self._history[ready, last]
        self.control[ready, Column.POSITION] = last

    # ---------------------------------------------------------------- decoding and leaving

    def record(
        self, live: NDArray[np.intp], tokens: NDArray[np.int32], logprobs: NDArray[np.float32], step: int
    ) -> list[tuple[int, Turn]]:
        """Take in a decode chunk.

        Args:
            live: the slots that decoded, [n].
            tokens: int32 [chunk, n]; -1 where nothing was sampled any more.
            logprobs: float32 [chunk, n].
            step: the step of the weights that sampled them.

        Returns:
            The slots that ended, and what each has sampled since its request came.
        """
        first = live[self.known[live] == self._prompt[live]]
        self._attended[first] = self._step[first]
        for token, logprob in zip(tokens, logprobs, strict=True):
            emitted = token >= 0
            slots = live[emitted]
            at = self.known[slots]
            self._history[slots, at] = token[emitted]
            self._logprobs[slots, at] = logprob[emitted]
            self._stamps[slots, at] = step
            self.known[slots] = at + 1
        last = self.known[live] - 1
        self.resident[live] = last
        sampled = self._history[live, last]
        self.control[live, Column.TOKEN] = sampled
        self.control[live, Column.POSITION] = last
        self.control[live, Column.LEFT] -= (tokens >= 0).sum(axis=0, dtype=np.int32)
        stopped = (self.control[live, Column.STOPS :] == sampled[:, None]).any(axis=1)
        ended = np.flatnonzero(stopped | (self.control[live, Column.LEFT] == 0))
        return [(int(live[i]), self._turn(int(live[i]), bool(stopped[i]))) for i in ended]

    def so_far(self, slot: int) -> Turn | None:
        """What a running slot has sampled since its request came, if anything."""
        return self._turn(slot, False) if self.known[slot] > self._prompt[slot] else None

    def _turn(self, slot: int, stopped: bool) -> Turn:
        at = slice(int(self._prompt[slot]), int(self.known[slot]))
        return Turn(
            self._history[slot, at].copy(),
            self._logprobs[slot, at].copy(),
            self._stamps[slot, at].copy(),
            "stop" if stopped else "length",
            int(self._attended[slot]),
        )

    def leave(self, slot: int) -> None:
        """End a slot's request; its conversation stays, idle."""
        if self.phase[slot] == FILLING:  # nobody waits for a slot that decodes
            self._source[slot] = -1
            self._orphan(np.flatnonzero(self._source == slot))
        self.phase[slot] = IDLE
        self.control[slot, Column.POSITION] = self.length
        self._requests[slot] = None
        self._ticket[slot] = self._tick()

    def release(self, conversation: Hashable) -> None:
        """Forget an idle conversation; what is cached serves as a prefix until the slot is taken."""
        slot = self._conversations.get(conversation)
        if slot is not None and not self.runs(slot):
            self._forget(slot)

    def _forget(self, slot: int) -> None:
        del self._conversations[self._keys[slot]]
        self._keys[slot] = None
        self.phase[slot] = FREE
        self._wanted[slot] = False

    def _orphan(self, slots: NDArray[np.intp]) -> None:
        self._source[slots] = -1
        self._orphans.update(slots.tolist())

    # ---------------------------------------------------------------- new weights

    def keep(self, version: Version) -> None:
        """New weights, old keys and values: each conversation goes on with its own, and shares none."""
        # Nothing is cached there yet: what will be is the new weights'.
        empty = self.resident == 0
        self._life[empty], self._step[empty] = version
        self._orphan(np.flatnonzero(self._source >= 0))

    def recompute(self, version: Version) -> None:
        """New weights, no old keys and values: running slots fill again, all others are dropped."""
        for slot in np.flatnonzero(self.phase == IDLE):
            self._forget(int(slot))
        running = self.running()
        self.phase[running] = FILLING
        self.control[running, Column.POSITION] = self.length
        self.resident[:] = 0
        self._life[:], self._step[:] = version
        self._source[:] = -1
        self._orphan(running)
