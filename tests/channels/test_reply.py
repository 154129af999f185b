import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from trouper.channels import Latest, Reply


async def test_an_answer_reaches_everyone_who_waits() -> None:
    reply, answers = Reply[int](), []

    async def ask() -> None:
        answers.append(await reply.wait())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        assert not reply.answered
        reply.set(7)
    assert reply.answered
    assert answers == [7, 7]
    assert await reply.wait() == 7


async def test_none_is_an_answer() -> None:
    reply = Reply[None]()
    reply.set(None)
    assert await reply.wait() is None  # type: ignore[func-returns-value]


async def test_a_failure_is_raised_where_the_answer_is_awaited() -> None:
    reply = Reply[int]()
    reply.fail(ValueError("no such prompt"))
    with pytest.raises(ValueError, match="no such prompt"):
        await reply.wait()


async def test_the_first_answer_stands() -> None:
    answered, failed = Reply[int](), Reply[int]()
    answered.set(1)
    answered.set(2)
    answered.fail(ValueError())
    assert await answered.wait() == 1
    failed.fail(ValueError("first"))
    failed.set(1)
    with pytest.raises(ValueError, match="first"):
        await failed.wait()


async def test_waiting_for_a_change_sees_one_that_came_before_the_wait() -> None:
    latest = Latest("a")
    assert latest.value == "a"
    seen = latest.changes
    latest.set("b")
    latest.set("c")
    assert await latest.wait(seen) == "c"
    assert latest.changes == 2


async def test_every_reader_is_woken_by_a_change() -> None:
    latest, got = Latest(0), []

    async def read() -> None:
        got.append(await latest.wait(latest.changes))

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(read)
        await wait_all_tasks_blocked()
        latest.set(5)
    assert got == [5, 5, 5]


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), max_size=10))
def test_a_slow_reader_skips_values_but_never_the_newest(bursts: list[int]) -> None:
    async def main() -> None:
        latest, newest, seen = Latest(0), 0, 0
        for burst in bursts:
            for _ in range(burst):
                newest += 1
                latest.set(newest)
            assert await latest.wait(seen) == newest
            seen = latest.changes

    trio.run(main)
