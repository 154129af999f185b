"""The source: which task a slot gets, at the end of the data and after a resume too."""

from random import Random
from typing import Any

import pytest
import trio

from trouper.actors.ledger import Ledger, SlotDraw
from trouper.actors.pacer import Pacer
from trouper.actors.quarantine import Quarantine
from trouper.actors.source import BEGINNING, Source, SourcePosition
from trouper.channels import Attempt, Channel, Outcome, Void


class Drawing:
    """A source whose attempts end at once, as `drop` decides: it says how often a slot's groups are dropped."""

    def __init__(
        self,
        ledger: Ledger,
        tasks: Any,
        *,
        steps: int | None,
        redraws: int = 0,
        per_step: int = 2,
        staleness: int = 1,
        drop: dict[int, int] | None = None,
        first: int = 0,
        resumed: SourcePosition = BEGINNING,
        stop_after: int | None = None,
    ) -> None:
        self.per_step = per_step
        self.pacer = Pacer(per_step, staleness, steps, redraws, 1, first_step=first)
        self.pacer.restore({open_.slot: open_.redraws for open_ in resumed.open})
        self.quarantine = Quarantine(1, resumed.quarantined, lambda task_id, cause: None)
        self.source = Source(tasks, self.pacer, self.quarantine, ledger, num_generations=2, run_seed=5, resumed=resumed)
        self.drop = drop or {}
        self.stop_after = stop_after
        self.attempts: list[Attempt] = []
        self.ended: list[tuple[int, int | None]] = []
        """(slot, draw, or None when void), in the order in which the slots ended."""

    async def __call__(self) -> "Drawing":
        tasks, outcomes = Channel[Attempt]("tasks", Attempt, 2), Channel[Outcome]("episodes", Outcome, 2)

        async def produce() -> None:
            with tasks.sender() as outbox, outcomes.sender() as voids:
                tasks.finish()
                outcomes.finish()
                await self.source.run(outbox, voids)

        async def play() -> None:
            async for attempt in tasks.receiver():
                self.attempts.append(attempt)
                if attempt.member == 1:
                    if self.drop.get(attempt.slot, 0) > 0 and self.pacer.reopen(attempt.slot):
                        self.drop[attempt.slot] -= 1
                    else:
                        self.end(attempt.slot, attempt.draw)

        async def void() -> None:
            async for outcome in outcomes.receiver():
                assert outcome == Void(outcome.slot, "end_of_data")
                self.end(outcome.slot, None)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(play)
            nursery.start_soon(void)
            await nursery.start(lambda task_status: task_status.started() or produce())
        return self

    def end(self, slot: int, draw: int | None) -> None:
        self.ended.append((slot, draw))
        self.pacer.close(slot)
        while self.pacer.closed // self.per_step > self.pacer.version:
            self.pacer.attest(self.pacer.version + 1)
        if len(self.ended) == self.stop_after:
            self.pacer.stop()


async def test_every_member_of_every_slot_is_an_attempt_at_the_slots_task(autojump_clock, ledger, stream) -> None:
    drawn = await Drawing(ledger, stream(), steps=2)()
    assert [(each.slot, each.draw, each.member, each.tries) for each in drawn.attempts] == [
        (slot, slot, member, 0) for slot in range(4) for member in range(2)
    ]
    assert {each.task.id for each in drawn.attempts} == {"0", "1", "2", "3"}
    assert len({each.seed for each in drawn.attempts}) == 8


async def test_a_reopened_slot_gets_the_next_task(autojump_clock, ledger, stream) -> None:
    drawn = await Drawing(ledger, stream(), steps=2, redraws=2, drop={1: 2})()
    slots = dict(drawn.ended)
    assert sorted(slots) == [0, 1, 2, 3]
    assert slots[1] > 1
    assert len(set(slots.values())) == 4


@pytest.mark.parametrize(
    ("count", "drop", "ended"),
    [
        (0, {}, []),
        (3, {}, [(0, 0), (1, 1), (2, 2)]),
        (4, {1: 1}, [(0, 0), (1, 2), (2, 3)]),
        (2, {0: 1}, [(0, 1)]),
        (1, {0: 1}, [(0, None)]),
    ],
)
async def test_the_data_may_end_anywhere(autojump_clock, ledger, stream, count, drop, ended) -> None:
    drawn = await Drawing(ledger, stream(count), steps=None, redraws=9, drop=drop, per_step=1, staleness=0)()
    assert drawn.ended == ended
    assert drawn.pacer.closed == drawn.pacer.total == len(ended)


async def test_a_position_holds_exactly_what_is_open(autojump_clock, ledger, stream) -> None:
    drawn = await Drawing(ledger, stream(), steps=3, redraws=3, drop={2: 1})()
    position = drawn.source.position(first_slot=2)
    ended = dict(drawn.ended)
    assert position.next_draw == 7  # six slots and one redraw
    assert [(each.slot, each.draw) for each in position.open] == [(slot, ended[slot]) for slot in range(2, 6)]
    assert drawn.source.position(first_slot=6).open == ()


async def test_a_resumed_source_gives_open_slots_what_they_had(autojump_clock, ledger, stream) -> None:
    resumed = SourcePosition(next_draw=9, open=(SlotDraw(2, 3, 0), SlotDraw(3, 8, 2)))
    resumes = Drawing(ledger, stream(), steps=3, redraws=2, first=1, resumed=resumed, drop={3: 1})
    drawn = await resumes()
    assert dict(drawn.ended) == {2: 3, 3: 8, 4: 9, 5: 10}  # slot 3 had no redraw left


async def test_a_position_remembers_redraws_and_which_slot_awaits_its_next_task(autojump_clock, ledger, stream) -> None:
    pacer = Pacer(3, 0, 1, 1, 1)
    source = Source(stream(), pacer, Quarantine(0, {}, print), ledger, num_generations=1, run_seed=5)
    tasks, voids = Channel[Attempt]("tasks", Attempt, 0), Channel[Outcome]("episodes", Outcome, 0)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(source.run, tasks.sender(), voids.sender())
            inbox = tasks.receiver()
            for _ in range(3):
                await inbox.receive()
            pacer.reopen(0)
            assert (await inbox.receive()).draw == 3
            pacer.reopen(1)  # its next task has not been asked for when the position is taken
            position = source.position(first_slot=0)
            scope.cancel()
    assert position == SourcePosition(4, (SlotDraw(0, 3, 1), SlotDraw(1, -1, 1), SlotDraw(2, 2, 0)))
    resumed = Drawing(ledger, stream(), steps=1, redraws=1, per_step=3, resumed=position, drop={0: 9, 1: 9, 2: 9})
    drawn = await resumed()
    assert dict(drawn.ended) == {0: 3, 1: 4, 2: 5}  # only slot 2 had a redraw left


@pytest.mark.parametrize("seed", range(30))
async def test_stopped_anywhere_and_resumed_no_slot_is_skipped_or_doubled(autojump_clock, ledger, stream, seed) -> None:
    random = Random(seed)
    whole = await Drawing(ledger, stream(), steps=8)()
    trained: list[tuple[int, int | None]] = []
    first, resumed = 0, BEGINNING
    while first < 8:
        life = Drawing(ledger, stream(), steps=8, first=first, resumed=resumed, stop_after=random.randint(1, 9))
        await life()
        done = first + len(life.ended) // 2  # whole steps; what lies beyond is lost with this life
        trained += [end for end in life.ended if end[0] < 2 * done]
        resumed, first = life.source.position(2 * done), done
    assert trained == whole.ended
