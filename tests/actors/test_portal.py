"""A real asyncio loop in a real thread, in real time: what is waited for is an event, under a deadline."""

import asyncio
import contextvars
import threading
import traceback
from typing import Any

import pytest
import trio
import trio.testing

from trouper.actors import portal as module
from trouper.actors.portal import AsyncioPortal

NAME = contextvars.ContextVar("NAME", default="nobody")


@pytest.fixture
async def portal():
    before = set(threading.enumerate())
    made = AsyncioPortal()
    yield made
    await made.close()
    assert {thread for thread in threading.enumerate() if "portal" in thread.name} <= before


async def until(condition: Any) -> None:
    with trio.fail_after(10):
        while not condition():  # another thread changes it, and sets no event of Trio's
            await trio.lowlevel.checkpoint()


async def test_everything_runs_on_one_loop_in_one_thread(portal) -> None:
    lock = asyncio.Lock()  # made here, bound where it is used

    async def where() -> tuple[int, int]:
        async with lock, asyncio.timeout(5):
            await asyncio.gather(asyncio.sleep(0), asyncio.create_task(asyncio.sleep(0.001)))
        return threading.get_ident(), id(asyncio.get_running_loop())

    first = await portal.call(where)
    assert first == await portal.call(lambda: asyncio.ensure_future(where()))  # called there, too
    assert first[0] != threading.get_ident()
    assert await portal.call(lambda: 7) == 7


async def test_a_thousand_calls_wait_at_the_same_time(portal) -> None:
    waiting, everyone = 0, asyncio.Event()

    async def wait() -> None:
        nonlocal waiting
        waiting += 1
        if waiting == 1000:
            everyone.set()
        await everyone.wait()

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            for _ in range(1000):
                nursery.start_soon(portal.call, wait)
    assert portal.abandoned == 0


async def test_context_variables_are_the_callers_and_changes_stay_there(portal) -> None:
    async def rename() -> str:
        found = NAME.get()
        NAME.set("inside")
        await asyncio.sleep(0)
        return found + NAME.get()

    NAME.set("caller-")
    assert await portal.call(rename) == "caller-inside"
    assert NAME.get() == "caller-"


async def test_an_error_comes_with_its_traceback(portal) -> None:
    async def breaks() -> None:
        await asyncio.sleep(0)
        raise LookupError("page 3")

    async def group() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(breaks())
            tasks.create_task(asyncio.sleep(1000))

    with pytest.raises(LookupError, match="page 3") as caught:
        await portal.call(breaks)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "breaks"
    with pytest.raises(ExceptionGroup) as grouped:
        await portal.call(group)
    assert [str(error) for error in grouped.value.exceptions] == ["page 3"]


@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyboardInterrupt, SystemExit])
async def test_what_would_end_the_loop_is_raised_here_and_the_loop_goes_on(portal, error) -> None:
    async def loop() -> int:
        return id(asyncio.get_running_loop())

    async def stop() -> None:
        raise error

    before = await portal.call(loop)
    with pytest.raises(error):
        await portal.call(stop)
    assert await portal.call(loop) == before


async def test_a_cancelled_caller_waits_for_the_finally_blocks(portal) -> None:
    told = []

    async def careful() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)  # cancelled once: what it awaits now comes to its end
            told.append("closed")
            raise

    with trio.move_on_after(0.02) as scope:
        await portal.call(careful)
    assert scope.cancelled_caught
    assert told == ["closed"]
    assert portal.abandoned == 0


async def test_a_call_cancelled_before_it_began_never_begins(portal) -> None:
    called = []
    await portal.call(int)
    with trio.CancelScope() as scope:
        scope.cancel()
        await portal.call(lambda: called.append(1))
    assert scope.cancelled_caught
    assert await portal.call(lambda: called) == []


async def test_a_task_that_ignores_its_cancellation_is_counted_until_it_ends(portal, monkeypatch) -> None:
    monkeypatch.setattr(module, "CANCEL_GRACE", 0.01)
    release, begun = asyncio.Event(), []

    async def stubborn() -> None:
        begun.append(True)
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    async with trio.open_nursery() as nursery:
        nursery.start_soon(portal.call, stubborn)
        await until(lambda: begun)
        nursery.cancel_scope.cancel()
    assert portal.abandoned == 1
    assert await portal.call(lambda: 7) == 7
    await portal.call(lambda: release.set())
    await until(lambda: portal.abandoned == 0)


async def test_a_loop_that_is_stuck_is_left_behind_in_a_daemon_thread(monkeypatch) -> None:
    monkeypatch.setattr(module, "CANCEL_GRACE", 0.01)
    monkeypatch.setattr(module, "CLOSE_GRACE", 0.01)
    portal, release, stuck = AsyncioPortal(), threading.Event(), []

    async def block() -> None:
        stuck.append(threading.current_thread())
        release.wait()

    async with trio.open_nursery() as nursery:
        for _ in range(3):  # the others never get their turn
            nursery.start_soon(portal.call, block)
        await until(lambda: stuck)
        nursery.cancel_scope.cancel()
    assert portal.abandoned == 1  # the others never began
    await portal.close()
    assert stuck[0].daemon
    release.set()
    await until(lambda: portal.abandoned == 0)
    await until(lambda: not stuck[0].is_alive())
    assert len(stuck) == 1


async def test_a_loop_that_is_stuck_is_named_and_replaced_and_what_waits_for_it_fails(
    portal, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(module, "CANCEL_GRACE", 0.01)
    release, stuck, errors, went_on = threading.Event(), [], [], []

    async def block() -> None:
        stuck.append(True)
        release.wait()

    async def innocent() -> None:
        await asyncio.Event().wait()
        went_on.append(True)

    async def waits() -> None:
        with pytest.raises(
            RuntimeError, match=r"its asyncio loop was blocked by .*block at .*test_portal\.py"
        ) as caught:
            await portal.call(innocent)
        errors.append(caught.value)

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(waits)
            await trio.testing.wait_all_tasks_blocked()
            with trio.move_on_after(0.05):
                await portal.call(block)
        assert len(errors) == 2
        assert "block at" in caplog.text
        assert portal.abandoned == 1
        assert await portal.call(lambda: asyncio.sleep(0, 7)) == 7
        release.set()
        await until(lambda: portal.abandoned == 0)
    assert went_on == []


async def test_a_loop_that_died_is_replaced(portal) -> None:
    async def kill() -> None:
        async def leave() -> None:
            raise SystemExit

        asyncio.create_task(leave())  # noqa: RUF006  # nobody awaits it: the interrupt reaches the loop itself
        await asyncio.Event().wait()

    first = await portal.call(asyncio.get_running_loop)
    with trio.fail_after(10), pytest.raises(asyncio.CancelledError):
        await portal.call(kill)
    await until(first.is_closed)
    assert await portal.call(lambda: 7) == 7


async def test_the_end_cancels_what_still_runs(portal) -> None:
    ended = []

    async def background() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    kept = []
    await portal.call(lambda: kept.append(asyncio.ensure_future(background())))
    await portal.call(lambda: asyncio.sleep(0))
    await portal.close()
    assert ended == [True]
