"""The device's thread, and what stands in its place in simulations."""

import threading
from functools import partial

import pytest
import trio
import trio.testing

from trouper.actors.accelerator import PATIENCE, DeviceThread
from trouper.actors.simulation import SimulatedAccelerator
from trouper.channels import RunError


async def test_calls_run_one_at_a_time_on_a_thread_that_bears_the_name() -> None:
    device, running, most = DeviceThread("sampler"), [], []

    def call(number: int) -> int:
        running.append(threading.current_thread().name)
        most.append(len(running))
        threading.Event().wait(0.001)
        running.pop()
        return number

    results: list[int] = []

    async def ask(number: int) -> None:
        results.append(await device.run(call, number))

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(ask, number)
    assert sorted(results) == list(range(5))
    assert most == [1] * 5
    assert device.busy_seconds > 0.004


async def test_a_cancelled_caller_waits_until_the_call_has_returned() -> None:
    device, release, ended = DeviceThread("trainer"), threading.Event(), []

    def call() -> None:
        release.wait()
        ended.append(threading.current_thread().name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(device.run, call)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        release.set()
    assert len(ended) == 1
    assert "trainer" in ended[0]


async def test_a_cancelled_caller_still_gets_the_result() -> None:
    device, release, results = DeviceThread("trainer"), threading.Event(), []

    async def ask() -> None:
        results.append(await device.run(release.wait))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        release.set()
    assert results == [True]


async def test_what_was_cancelled_before_its_turn_never_runs() -> None:
    device, release, ran = DeviceThread("trainer"), threading.Event(), []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(device.run, release.wait)
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(0):
            await device.run(ran.append, 1)
        release.set()
    assert ran == []


async def test_a_call_that_never_returns_is_named_and_costs_the_device(autojump_clock) -> None:
    device, release = DeviceThread("sampler"), threading.Event()

    def wedged(extra: int) -> None:
        release.wait()

    errors: list[RunError] = []

    async def ask() -> None:
        try:
            await device.run(partial(wedged, 1))
        except RunError as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.sleep(5.0)
        nursery.cancel_scope.cancel()
    assert trio.current_time() == 5.0 + PATIENCE
    (error,) = errors
    assert "'sampler' has not returned from" in str(error)
    assert f"wedged for {5 + PATIENCE:.0f} s" in str(error)
    with pytest.raises(RunError, match=r"'sampler' has not returned from .*wedged .* pow cannot run"):
        await device.run(pow, 2, 3)
    assert trio.current_time() == 5.0 + PATIENCE
    release.set()


async def test_it_says_what_runs_and_since_when(mock_clock) -> None:
    device, release = DeviceThread("sampler"), threading.Event()

    class Engine:
        def step(self) -> None:
            release.wait()

    assert device.running is None
    async with trio.open_nursery() as nursery:
        mock_clock.jump(3.0)
        nursery.start_soon(device.run, Engine().step)
        await trio.testing.wait_all_tasks_blocked()
        name, since = device.running
        assert name.endswith("Engine.step")
        assert since == 3.0
        release.set()
    assert device.running is None


async def test_an_error_of_the_call_comes_out_and_the_device_goes_on() -> None:
    device = DeviceThread("sampler")
    with pytest.raises(ZeroDivisionError):
        await device.run(lambda: 1 / 0)
    assert await device.run(pow, 2, 3) == 8
    assert device.running is None


async def test_a_simulated_device_spends_virtual_time_one_call_after_another(autojump_clock) -> None:
    device = SimulatedAccelerator("sampler", lambda call: {"pow": 2.0}[call])
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(device.run, pow, 2, 3)
        await trio.sleep(3.0)
        assert device.running == ("pow", 2.0)
    assert (trio.current_time(), device.busy_seconds, device.running) == (6.0, 6.0, None)
    with trio.move_on_after(1.0):  # a call that has begun cannot be interrupted
        await device.run(pow, 2, 3)
    assert trio.current_time() == 8.0
