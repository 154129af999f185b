"""The device's thread, and what stands in its place in simulations."""

import threading

import pytest
import trio
import trio.testing

from trouper.actors.accelerator import DeviceThread
from trouper.actors.simulation import SimulatedAccelerator


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


async def test_an_error_of_the_call_comes_out_and_the_device_goes_on() -> None:
    device = DeviceThread("sampler")
    with pytest.raises(ZeroDivisionError):
        await device.run(lambda: 1 / 0)
    assert await device.run(pow, 2, 3) == 8


async def test_a_simulated_device_spends_virtual_time_one_call_after_another(autojump_clock) -> None:
    device = SimulatedAccelerator("sampler", lambda call: {"pow": 2.0}[call])
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(device.run, pow, 2, 3)
    assert (trio.current_time(), device.busy_seconds) == (6.0, 6.0)
    with trio.move_on_after(1.0):  # a call that has begun cannot be interrupted
        await device.run(pow, 2, 3)
    assert trio.current_time() == 8.0
