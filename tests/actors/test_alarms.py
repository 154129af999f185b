"""Alarms ring at their moment, in order, whenever they were set."""

from typing import Any

import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from trouper.actors.alarms import Alarms, Deadline


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_each_rings_once_at_its_moment_or_when_it_is_set_too_late(orders: list[tuple[int, int]]) -> None:
    """Each order: when it is set, and for which moment."""
    rung: list[tuple[float, int]] = []

    async def main() -> None:
        alarms = Alarms()
        begin = trio.current_time()

        async def set_one(number: int, at: int, moment: int) -> None:
            await trio.sleep_until(begin + at)
            alarms.set(begin + moment, lambda told: rung.append((trio.current_time() - begin, number)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(alarms.run)
            for number, (at, moment) in enumerate(orders):
                nursery.start_soon(set_one, number, at, moment)
            await trio.sleep(10)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert sorted(number for _, number in rung) == list(range(len(orders)))
    for when, number in rung:
        assert when == max(orders[number])


async def test_one_that_rings_may_set_the_next(autojump_clock, nursery) -> None:
    alarms, rung = Alarms(), []

    def ring(moment: float) -> None:
        rung.append(moment)
        if moment < 3:
            alarms.set(moment + 1, ring)

    alarms.set(1.0, ring)
    nursery.start_soon(alarms.run)
    await trio.sleep(10)
    assert rung == [1.0, 2.0, 3.0]


async def test_a_deadline_passes_at_its_newest_moment_and_sets_few_alarms(autojump_clock, nursery) -> None:
    far: list[float] = []

    class Watched(Alarms):
        def set(self, moment: float, *ring: Any) -> None:
            if moment > trio.current_time() + 100:
                far.append(moment)
            super().set(moment, *ring)

    alarms, passed = Watched(), []
    nursery.start_soon(alarms.run)
    deadline = Deadline(alarms, lambda: passed.append(trio.current_time()))
    for _ in range(500):  # what may take an hour takes a second, what may take two takes half of one
        for limit, seconds in ((3600.0, 1.0), (2.0, 0.5)):
            deadline.set(trio.current_time() + limit)
            await trio.sleep(seconds)
    assert passed == []
    assert len(far) == 1
    deadline.set(trio.current_time() + 7.0)
    due = trio.current_time() + 7.0
    await trio.sleep(7200)
    assert passed == [due]
