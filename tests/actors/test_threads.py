"""Real threads in real time: what they wait for is an event that the test sets."""

import asyncio
import contextvars
import functools
import threading
from functools import partial

import pytest
import trio
import trio.testing

from trouper.actors import portal
from trouper.actors.aside import stuck
from trouper.actors.threads import Threads, as_failure
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
    with pytest.raises(RunError, match=r"2 calls .*max_abandoned_threads allows 1.*isolation = \"process\""):
        await threads.call(lambda: 7)
    release.set()
    await until(lambda: threads.abandoned == 0)
    assert await threads.call(lambda: 7) == 7


async def test_an_error_comes_out_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        await Threads(1, 0, "thread").call(lambda: 1 / 0)


class Panic(BaseException):
    """As the Rust extensions raise it."""


async def fails(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("library", ["trio", "asyncio"])
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("kind", [Panic, asyncio.CancelledError, SystemExit, GeneratorExit])
async def test_what_is_neither_an_exception_nor_an_interrupt_is_the_codes_failure(library, plain, kind) -> None:
    error = kind("at src/lib.rs:1")

    def fail() -> None:
        raise error

    threads = Threads(1, 0, "thread", library)
    with pytest.raises(RuntimeError, match=f"{type(error).__name__}: at src/lib.rs:1") as caught:
        await threads.call(fail if plain else partial(fails, error))
    assert caught.value.__cause__ is error
    await threads.close()


@pytest.mark.parametrize(("library", "plain"), [("trio", True), ("asyncio", True), ("asyncio", False)])
async def test_an_interrupt_off_the_main_thread_is_the_codes_failure(library, plain) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    threads = Threads(1, 0, "thread", library)
    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        await threads.call(fail if plain else partial(fails, KeyboardInterrupt()))
    await threads.close()


async def test_a_task_that_does_not_end_is_left_behind_counted_and_bounded(autojump_clock) -> None:
    threads, release = Threads(1, 0, "thread"), trio.Event()

    async def hang() -> None:
        with trio.CancelScope(shield=True):
            await release.wait()

    with trio.move_on_after(5.0) as scope, pytest.raises(BaseExceptionGroup) as caught:
        await threads.aside(hang, lambda: 3.0, "the test")
    assert trio.current_time() == 8.0
    assert scope.cancel_called
    assert "the test, at " in str(caught.value.exceptions[0])
    assert "hang (test_threads.py:" in str(caught.value.exceptions[0])
    assert threads.abandoned == 1
    with pytest.raises(RunError, match=r"1 calls .* allows 0"):
        await threads.aside(hang, lambda: 3.0)
    release.set()
    assert await stuck(10.0) == []
    assert threads.abandoned == 0


async def test_a_task_aside_is_its_callers_in_all_other_ways(autojump_clock) -> None:
    name = contextvars.ContextVar("name", default="nobody")
    name.set("caller")
    threads = Threads(1, 0, "thread")

    async def answer() -> tuple[str, bool]:
        await trio.sleep(1.0)
        return name.get(), trio.lowlevel.currently_ki_protected()

    assert await threads.aside(answer, lambda: 1.0) == ("caller", False)
    error = ValueError("env 42")
    with pytest.raises(ValueError, match="env 42") as caught:
        await threads.aside(partial(fails, error), lambda: 1.0)
    assert caught.value is error
    with trio.move_on_after(1.0) as scope:
        await threads.aside(trio.sleep_forever, lambda: 1.0)
    assert scope.cancelled_caught


def test_a_group_keeps_its_interrupts_and_exceptions() -> None:
    value, interrupt = ValueError("env 42"), KeyboardInterrupt()
    group = BaseExceptionGroup("a", [value, BaseExceptionGroup("b", [interrupt, Panic("p")])])
    failure = as_failure(group)
    assert failure.exceptions[0] is value
    assert failure.exceptions[1].exceptions[0] is interrupt
    assert repr(failure.exceptions[1].exceptions[1]) == "RuntimeError('Panic: p')"
    assert isinstance(as_failure(BaseExceptionGroup("a", [value, Panic("p")])), Exception)
    untouched = ExceptionGroup("a", [value])
    assert as_failure(untouched) is untouched


# asyncio -------------------------------------------------------------------------------------------------------


@pytest.fixture
async def on_asyncio():
    threads = Threads(1, 1, "thread", "asyncio")
    yield threads
    await threads.close()


async def test_async_functions_run_on_asyncio_and_plain_ones_in_threads(on_asyncio) -> None:
    async def asynchronous() -> int:
        await asyncio.sleep(0.001)
        return threading.get_ident()

    @functools.wraps(asynchronous)
    def decorated() -> object:
        return asynchronous()

    loop = await on_asyncio.call(asynchronous)
    assert loop != threading.get_ident()
    assert await on_asyncio.call(decorated) == loop  # made in a thread, awaited there
    assert await on_asyncio.call(threading.get_ident) not in (loop, threading.get_ident())
    inline = Threads(1, 0, "inline", "asyncio")
    assert await inline.call(threading.get_ident) == await inline.call(asynchronous)
    assert await inline.call(lambda: asyncio.gather(asynchronous(), asynchronous()))  # needs the loop to be called
    await inline.close()


async def test_tasks_left_behind_end_the_run_like_threads(on_asyncio, monkeypatch) -> None:
    monkeypatch.setattr(portal, "CANCEL_GRACE", 0.01)
    release = threading.Event()

    async def block() -> None:
        release.wait()

    for _ in range(2):
        with trio.move_on_after(0.01):
            await on_asyncio.call(block)
    for function in (block, int):
        with pytest.raises(RunError, match=r"2 calls .*max_abandoned_threads allows 1"):
            await on_asyncio.call(function)
    release.set()
    await until(lambda: on_asyncio.abandoned == 0)
    assert await on_asyncio.call(int) == 0


async def sleeps(seconds: float) -> None:
    await asyncio.sleep(seconds)


async def asks_for_the_loop() -> None:
    asyncio.get_running_loop()


@pytest.mark.parametrize("function", [partial(sleeps, 1.0), partial(sleeps, 0.0), asks_for_the_loop])
async def test_asyncio_code_without_its_loop_is_told_the_key(function) -> None:
    with pytest.raises(RuntimeError, match=r'needs environment\.async_library = "asyncio"'):
        await Threads(1, 0, "thread").call(function)


async def test_code_that_misses_its_loop_under_asyncio_is_told_why(on_asyncio) -> None:
    with pytest.raises(RuntimeError, match=r'no running event loop\. .* or set environment\.isolation = "inline"'):
        await on_asyncio.call(lambda: asyncio.get_running_loop())
    with pytest.raises(RuntimeError, match=r'needs environment\.async_library = "trio"'):
        await on_asyncio.call(partial(trio.sleep, 1.0))
