"""Real threads in real time: what they wait for is an event that the test sets."""

import threading
from functools import partial

import pytest
import trio
import trio.testing

from trouper.actors.threads import Threads
from trouper.channels import RunError


async def until(condition) -> None:
    with trio.fail_after(10):
        while not condition():  # a thread changes it, and sets no event
            await trio.lowlevel.checkpoint()


async def test_plain_functions_run_in_threads_and_async_ones_on_the_loop() -> None:
    loop = threading.get_ident()
    threads = Threads(1, 0, "thread")

    def plain() -> int:
        return threading.get_ident()

    async def asynchronous() -> int:
        return threading.get_ident()

    assert await threads.call(plain) != loop
    assert await threads.call(asynchronous) == loop
    assert await threads.call(partial(partial(asynchronous))) == loop
    assert await threads.call(lambda: asynchronous()) == loop  # made in a thread, awaited here
    assert await Threads(1, 0, "inline").call(plain) == loop


async def test_a_call_that_outlives_its_deadline_is_counted_until_it_returns() -> None:
    threads = Threads(1, 1, "thread")
    release = threading.Event()
    with trio.move_on_after(0.01):
        await threads.call(release.wait)
    assert threads.abandoned == 1
    assert await threads.call(lambda: 7) == 7
    release.set()
    await until(lambda: threads.abandoned == 0)


async def test_a_call_that_never_began_leaves_nothing_behind() -> None:
    threads = Threads(1, 0, "thread")
    release = threading.Event()
    called = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(threads.call, release.wait)
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(0.01):
            await threads.call(lambda: called.append(1))
        with trio.CancelScope() as gone:
            gone.cancel()
            await threads.call(lambda: called.append(2))
        assert threads.abandoned == 0
        release.set()
    assert called == []


async def test_too_many_threads_left_behind_end_the_run() -> None:
    threads = Threads(2, 1, "thread")
    release = threading.Event()
    for _ in range(2):
        with trio.move_on_after(0.01):
            await threads.call(release.wait)
    with pytest.raises(RunError, match=r"2 threads .*max_abandoned_threads allows 1"):
        await threads.call(lambda: 7)
    release.set()
    await until(lambda: threads.abandoned == 0)
    assert await threads.call(lambda: 7) == 7


async def test_an_error_comes_out_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        await Threads(1, 0, "thread").call(lambda: 1 / 0)
