"""Slot bookkeeping against a device made of hashes: every cached cell knows the whole prefix it was computed from."""

from collections import deque
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trouper.channels import Turn
from trouper.learner.control import Column, Copy
from trouper.learner.request import Request, rest
from trouper.learner.slots import FILLING, FREE, IDLE, Slots

Cell = tuple[int, int]
"""(hash of the tokens up to here, step of the weights that made it)"""


class Device:
    """Cells instead of keys and values, and a sampler that repeats 1, 2, 3, ..."""

    def __init__(self, slots: int, length: int, rows: int = 4, widths: tuple[int, ...] = (1, 4)) -> None:
        self.slots = Slots(slots, length)
        self.cells: list[list[Cell | None]] = [[None] * length for _ in range(slots)]
        self.waiting: deque[Request] = deque()
        self.turns: dict[int, Turn] = {}
        self.version = (0, 0)
        self.rows, self.widths = rows, widths
        self.filled: list[dict[int, int]] = []
        self.copied: list[Copy] = []

    def submit(self, id: int, conversation: int, tokens: Sequence[int], max_tokens: int = 3) -> None:
        self.waiting.append(Request(id, conversation, np.array(tokens, np.int32), max_tokens))
        self.slots.want(conversation)

    def step(self, chunk: int = 2) -> None:
        copies = self.slots.replan(self.version)
        strangers = []
        while self.waiting:
            conversation = self.waiting[0].conversation
            stranger = self.slots.slot_of(conversation) is None
            admission = self.slots.admit(self.waiting[0], self.version)
            if admission is None:
                break
            self.waiting.popleft()
            copies += admission.copies
            strangers += [admission.slot] * stranger
        self._copy(copies)
        for slot in strangers:
            self._current(slot, int(self.slots.resident[slot]))
        self._fill()
        self._copy(self.slots.follow())
        self.slots.go_live()
        self._decode(chunk)

    def _copy(self, copies: list[Copy]) -> None:
        self.copied += copies
        for copy in copies:
            self._current(copy.source, copy.length)
            self.cells[copy.target][: copy.length] = self.cells[copy.source][: copy.length]
            assert self.slots._step[copy.target] == self.version[1]

    def _current(self, slot: int, length: int) -> None:
        """What one conversation has from another was made under the present weights."""
        assert all(cell and cell[1] == self.version[1] for cell in self.cells[slot][:length])

    def _fill(self) -> None:
        fill = self.slots.fill(self.rows, self.widths)
        self.filled.append({})
        if fill is None:
            return
        assert len(fill.slots) == len(fill.tokens) == self.rows
        assert fill.tokens.shape[1] in self.widths
        written = 0
        for slot, tokens, positions in zip(fill.slots, fill.tokens, fill.positions, strict=True):
            for token, position in zip(tokens, positions, strict=True):
                if position < self.slots.length:
                    self._write(int(slot), int(position), int(token))
                    self.filled[-1][int(slot)] = self.filled[-1].get(int(slot), 0) + 1
                    assert position < fill.reach
                    written += 1
        assert written == fill.count > 0

    def _write(self, slot: int, position: int, token: int) -> None:
        before = self.cells[slot][position - 1] if position else None
        self.cells[slot][position] = (hash((before and before[0], token)), self.version[1])

    def _decode(self, chunk: int) -> None:
        live = self.slots.live()
        tokens = np.full((chunk, len(live)), -1, np.int32)
        for column, slot in enumerate(live):
            token, position, left = self.slots.control[slot, [Column.TOKEN, Column.POSITION, Column.LEFT]]
            for row in range(min(chunk, left)):
                self._write(int(slot), int(position) + row, int(token))
                token = tokens[row, column] = (token + 1) % 5
        for slot, turn in self.slots.record(live, tokens, np.zeros(tokens.shape, np.float32), self.version[1]):
            self.turns[self.slots.request(slot).id] = turn
            self.slots.leave(slot)

    def check(self) -> None:
        """What the bookkeeping claims is so."""
        slots = self.slots
        for slot in range(slots.count):
            resident, known = int(slots.resident[slot]), int(slots.known[slot])
            assert 0 <= resident <= max(known - 1, 0)
            prefix: int | None = None
            for position, token in enumerate(slots._history[slot, :resident]):
                cell, prefix = self.cells[slot][position], hash((prefix, int(token)))
                assert cell is not None
                assert cell[0] == prefix, f"slot {slot} holds another prefix at {position}"
                assert cell[1] >= slots._step[slot], "a key is older than is said"
            if slots.runs(slot) and resident == 0:
                assert slots._step[slot] == self.version[1]
            decodes = slot in slots.live()
            assert (slots.control[slot, Column.POSITION] < slots.length) == decodes
            assert (slots._requests[slot] is not None) == slots.runs(slot)
            source = slots._source[slot]
            assert source < 0 or (slots.phase[slot] == FILLING and slots.phase[source] == FILLING)
        homes = list(slots._conversations.values())
        assert len(set(homes)) == len(homes)
        assert set(homes) == {slot for slot in range(slots.count) if slots.phase[slot] != FREE}

    def finish(self, limit: int = 300) -> None:
        for _ in range(limit):
            if not self.waiting and not len(self.slots.running()):
                return
            self.step()
            self.check()
        raise AssertionError("requests wait for ever")


def test_members_of_a_group_share_one_prefill() -> None:
    device = Device(4, 32)
    for member in range(4):
        device.submit(member, member, range(9))
    device.step()
    device.check()
    assert sum(device.filled[0].values()) == 8
    assert [copy.length for copy in device.copied] == [8, 8, 8]
    assert len(device.slots.live()) == 4
    assert device.slots.reused == 24


def test_members_with_different_tails_fill_only_their_tails() -> None:
    device = Device(3, 40, rows=8)
    for member in range(3):
        device.submit(member, member, [*range(20), 30 + member, 31 + member])
    device.step()
    device.finish()
    filled = sum(sum(step.values()) for step in device.filled)
    assert filled == 20 + 3 * 1  # the last token is fed by the first decode step
    assert sorted(device.turns) == [0, 1, 2]


def test_a_conversation_appends_to_what_is_cached() -> None:
    device = Device(2, 32)
    device.submit(0, 7, range(6))
    device.finish()
    context = [*range(6), *device.turns[0].tokens, 11, 12]
    device.filled.clear()
    device.submit(1, 7, context)
    device.finish()
    # The last sampled token was never fed, the last of the context never is.
    assert sum(sum(step.values()) for step in device.filled) == 2


def test_a_long_context_does_not_hold_up_short_ones() -> None:
    device = Device(3, 64, rows=3, widths=(4,))
    device.submit(0, 0, range(40))
    device.submit(1, 1, [50, 51, 52])
    device.submit(2, 2, [60, 61, 62])
    device.step()
    assert device.filled[0] == {0: 4, 1: 2, 2: 2}
    device.step()
    assert device.filled[1] == {0: 12}, "rows that nobody else needs go to the long one"
    device.finish()


def test_a_call_is_as_narrow_as_what_waits() -> None:
    """A call costs what its shape costs: the wide one is made where at least half as full as the narrow one."""
    for lengths, width, count in [([5] * 4, 4, 16), ([33], 16, 32), ([32], 4, 16), ([5, 40, 3], 16, 4 + 32 + 2)]:
        slots = Slots(4, 64)
        for id, n in enumerate(lengths):
            admission = slots.admit(Request(id, id, np.full(n, id, np.int32), 3), (0, 0))
            assert admission is not None
        fill = slots.fill(4, (4, 16))
        assert fill is not None
        assert (fill.tokens.shape, fill.count) == ((4, width), count), lengths
        assert np.count_nonzero(fill.positions < 64) == count


def test_the_conversation_used_longest_ago_makes_room() -> None:
    device = Device(2, 32)
    for conversation in (1, 2):
        device.submit(conversation, conversation, [conversation] * 5)
        device.finish()
    device.submit(3, 3, [3] * 5)
    device.finish()
    assert device.slots.slot_of(1) is None
    assert device.slots.slot_of(2) is not None
    assert device.slots.evictions == 1


def test_a_conversation_whose_next_turn_waits_is_dropped_last() -> None:
    device = Device(2, 32)
    for conversation in (1, 2):
        device.submit(conversation, conversation, [conversation] * 5)
        device.finish()
    device.submit(3, 3, [3] * 5)
    device.submit(4, 1, [1] * 9)
    device.step()
    assert device.slots.slot_of(2) is None
    assert device.slots.slot_of(1) is not None
    device.finish()


def test_requests_get_slots_in_the_order_they_came() -> None:
    device = Device(2, 32)
    for id in range(6):
        device.submit(id, id, [id, id + 1, id + 2], max_tokens=2)
    order = []
    while len(device.turns) < 6:
        device.step()
        order.append(sorted(set(device.turns)))
    assert order == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]


def test_a_second_request_of_a_running_conversation_waits_for_the_first() -> None:
    device = Device(3, 32)
    device.submit(0, 5, range(4), max_tokens=6)
    device.submit(1, 5, range(5), max_tokens=2)
    device.step()
    assert device.slots.request(int(device.slots.running()[0])).id == 0
    device.finish()
    assert [len(device.turns[id].tokens) for id in (0, 1)] == [6, 2]


def test_a_released_conversation_still_serves_as_a_prefix() -> None:
    device = Device(2, 64)
    device.submit(0, 0, [*range(20), 30])
    device.finish()
    device.slots.release(0)
    device.submit(1, 1, [*range(20), 40, 41])
    device.finish()
    assert device.slots.reused == 20


def test_followers_of_a_cancelled_leader_go_on_alone() -> None:
    device = Device(3, 64, rows=1, widths=(4,))
    for member in range(3):
        device.submit(member, member, range(30))
    for _ in range(3):
        device.step()
    leader = int(device.slots.running()[0])
    device.slots.leave(leader)
    device.check()
    device.finish()
    assert sorted(device.turns) == [1, 2]
    assert sum(sum(step.values()) for step in device.filled) == 29, "what the leader had cached was used"


def test_kept_keys_are_continued_by_their_own_conversation_alone() -> None:
    device = Device(3, 64)
    device.submit(0, 0, range(20))
    device.finish()
    device.version = (0, 1)
    device.slots.keep(device.version)
    device.submit(1, 1, range(20))
    device.submit(2, 0, [*range(20), *device.turns[0].tokens, 9])
    device.finish()
    assert device.turns[1].kv_version == 1
    assert device.turns[2].kv_version == 0
    assert {cell[1] for cell in device.cells[device.slots.slot_of(1) or 0][:20] if cell} == {1}


def test_who_waits_for_a_prefix_does_not_take_it_from_older_weights() -> None:
    device = Device(2, 64, rows=1, widths=(4,))
    for member in range(2):
        device.submit(member, member, range(30))
    device.step()
    device.version = (0, 1)
    device.slots.keep(device.version)
    device.finish()
    assert [device.turns[member].kv_version for member in range(2)] == [0, 1]


def test_a_conversation_that_copies_newer_keys_over_its_own_has_newer_keys() -> None:
    device = Device(2, 64)
    device.submit(0, 0, [*range(4), 30])
    device.finish()
    device.version = (0, 1)
    device.slots.keep(device.version)
    device.submit(1, 1, range(30))
    device.finish()
    device.submit(2, 0, range(29))
    device.finish()
    assert device.slots.reused == 28
    assert device.turns[2].kv_version == 1


def test_recompute_drops_idle_conversations_and_fills_running_ones_again() -> None:
    device = Device(3, 64)
    device.submit(0, 0, range(10))
    device.finish()
    device.submit(1, 1, range(30, 40), max_tokens=8)
    device.step()
    device.version = (0, 1)
    device.slots.recompute(device.version)
    device.check()
    assert device.slots.slot_of(0) is None
    device.finish()
    turn = device.turns[1]
    assert turn.versions.tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert turn.kv_version == 0, "its first tokens attended to the old keys"
    device.submit(2, 1, [*range(30, 40), *turn.tokens, 9])
    device.finish()
    assert device.turns[2].kv_version == 1


def test_a_running_slot_tells_what_it_has_sampled_so_far() -> None:
    device = Device(2, 64, rows=1, widths=(4,))
    device.submit(0, 0, range(10), max_tokens=8)
    device.step()
    slot = int(device.slots.running()[0])
    assert device.slots.so_far(slot) is None, "its context is not cached yet"
    while not len(device.slots.live()):
        device.step()
    part = device.slots.so_far(slot)
    assert part is not None
    assert (len(part.tokens), part.versions.tolist(), part.kv_version) == (2, [0, 0], 0)
    device.slots.leave(slot)
    device.check()
    device.submit(1, 0, [*range(10), *part.tokens], max_tokens=6)
    device.filled.clear()
    device.finish()
    assert not any(device.filled), "all but the last token is cached, and that one the next decode step feeds"
    assert len(device.turns[1].tokens) == 6


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_any_workload_is_served_and_never_from_a_wrong_prefix(data: st.DataObject) -> None:
    slots = data.draw(st.integers(1, 5))
    device = Device(
        slots, 48, rows=data.draw(st.sampled_from([1, 3, 8])), widths=data.draw(st.sampled_from([(1, 4), (2, 6), (5,)]))
    )
    contexts: dict[int, list[int]] = {}
    running: dict[int, int] = {}
    cancelled: set[int] = set()
    id = 0
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(
            st.sampled_from(["new", "new", "next", "step", "step", "step", "cancel", "abort", "release", "swap"])
        )
        if action == "new":
            shared = data.draw(st.integers(0, 20))
            tail = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
            contexts[id] = [*range(shared), *tail]
            device.submit(id, id, contexts[id], data.draw(st.integers(1, 5)))
            running[id] = id
            id += 1
        elif action == "next" and contexts:
            conversation = data.draw(st.sampled_from(sorted(contexts)))
            if conversation not in running.values() and len(contexts[conversation]) < 36:
                # Most agents append; some rewrite what they said.
                cut = data.draw(st.sampled_from([0, 0, 0, 3]))
                kept = contexts[conversation][: max(1, len(contexts[conversation]) - cut)]
                contexts[conversation] = [*kept, *data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))]
                device.submit(id, conversation, contexts[conversation], data.draw(st.integers(1, 5)))
                running[id] = conversation
                id += 1
        elif action == "cancel" and running:
            victim = data.draw(st.sampled_from(sorted(running)))
            del running[victim]
            cancelled.add(victim)
            device.waiting = deque(request for request in device.waiting if request.id != victim)
            for slot in device.slots.running():
                if device.slots.request(int(slot)).id == victim:
                    device.slots.leave(int(slot))
        elif action == "abort":
            for slot in reversed(device.slots.running().tolist()):
                asked, part = device.slots.request(slot), device.slots.so_far(slot)
                device.slots.leave(slot)
                left = asked if part is None else rest(asked, part)
                assert left is not None, "what had ended is no longer running"
                contexts[running[asked.id]] += [] if part is None else part.tokens.tolist()
                device.waiting.appendleft(left)
                device.slots.want(left.conversation)
        elif action == "release" and contexts:
            conversation = data.draw(st.sampled_from(sorted(contexts)))
            if conversation not in running.values():
                device.slots.release(conversation)
        elif action == "swap":
            device.version = (0, device.version[1] + 1)
            (device.slots.keep if data.draw(st.booleans()) else device.slots.recompute)(device.version)
        elif action == "step":
            device.step(data.draw(st.integers(1, 3)))
        for done in [done for done in running if done in device.turns]:
            contexts[running.pop(done)] += device.turns[done].tokens.tolist()
        device.check()
    device.finish()
    assert set(device.turns) == set(range(id)) - cancelled
    for turn in device.turns.values():
        assert (np.diff(turn.versions) >= 0).all()
        assert turn.kv_version <= turn.versions[-1]
    assert set(device.slots.phase.tolist()) <= {FREE, IDLE}
