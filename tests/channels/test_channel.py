from collections.abc import Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trouper.channels import Channel


@pytest.mark.parametrize("capacity", [-1, 0.5, float("inf")])
def test_a_channel_has_a_bound(capacity: Any) -> None:
    with pytest.raises(ValueError, match=f"channel 'raw' was given capacity {capacity}; it must be a whole number"):
        Channel[int]("raw", int, capacity)


async def test_messages_come_in_order_and_end_after_finish() -> None:
    channel = Channel[int]("raw", int, 3)
    with channel.sender() as sender, channel.receiver() as receiver:
        assert sender.name == receiver.name == "raw"
        for number in range(3):
            await sender.send(number)
        channel.finish()
        sender.close()
        assert not channel.ended
        assert [number async for number in receiver] == [0, 1, 2]
        assert channel.ended
        with pytest.raises(trio.EndOfChannel):
            await receiver.receive()


async def test_a_full_channel_stops_its_producer(autojump_clock: MockClock) -> None:
    channel = Channel[int]("raw", int, 2)
    sender, receiver = channel.sender(), channel.receiver()
    with trio.move_on_after(5.0) as scope:
        for number in range(3):
            await sender.send(number)
    assert scope.cancelled_caught
    assert [receiver.receive_nowait() for _ in range(2)] == [0, 1]
    with pytest.raises(trio.WouldBlock):  # the cancelled send left nothing
        receiver.receive_nowait()


async def test_a_lent_end_that_closes_leaves_the_other_side_waiting(autojump_clock: MockClock) -> None:
    channel = Channel[int]("raw", int, 1)
    channel.sender().close()
    channel.receiver().close()
    with channel.sender() as sender:
        await sender.send(1)
    with channel.receiver() as receiver:
        assert await receiver.receive() == 1
        with trio.move_on_after(1.0) as scope:
            await receiver.receive()
    assert scope.cancelled_caught


async def test_clones_keep_a_channel_open_until_all_are_closed() -> None:
    channel = Channel[int]("raw", int, 4)
    first, receiver = channel.sender(), channel.receiver()
    second, other = first.clone(), receiver.clone()
    channel.finish()
    first.close()
    await second.send(1)
    receiver.close()
    second.close()
    assert [number async for number in other] == [1]


async def test_an_abandoned_channel_breaks_its_producers() -> None:
    channel = Channel[int]("raw", int, 0)
    sender, receiver = channel.sender(), channel.receiver()
    channel.abandon()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(receiver.receive)
        await sender.send(1)
    receiver.close()
    with pytest.raises(trio.BrokenResourceError):
        await sender.send(2)


@pytest.mark.parametrize("closed", [lambda channel: None, Channel.finish, Channel.abandon, Channel.close])
async def test_a_renewed_channel_is_open_and_empty_and_goes_on_counting(closed: Callable[[Channel[int]], None]) -> None:
    channel = Channel[int]("raw", int, 2)
    with channel.sender() as sender, channel.receiver() as receiver:
        for number in range(2):
            await sender.send(number)
        await receiver.receive()
        closed(channel)
    channel.renew()
    assert not channel.ended
    assert (channel.statistics().depth, channel.statistics().peak) == (0, 2)
    with channel.sender() as sender, channel.receiver() as receiver:
        await sender.send(7)
        assert await receiver.receive() == 7
        channel.finish()
        sender.close()
        assert [number async for number in receiver] == []
    assert (channel.statistics().sent, channel.statistics().received) == (3, 2)


async def test_ends_from_before_a_renewal_belong_to_the_old_pipe() -> None:
    channel = Channel[int]("raw", int, 2)
    old_sender, old_receiver = channel.sender(), channel.receiver()
    await old_sender.send(1)
    channel.renew()
    sender, receiver = channel.sender(), channel.receiver()
    old_sender.close()
    assert [number async for number in old_receiver] == [1]
    await sender.send(2)
    assert receiver.receive_nowait() == 2


async def test_closing_wakes_whoever_waits() -> None:
    channel = Channel[int]("raw", int, 0)
    receiver = channel.receiver()

    async def wait() -> None:
        with pytest.raises(trio.EndOfChannel):
            await receiver.receive()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        channel.close()


async def test_statistics_tell_depth_peak_counts_and_waits(autojump_clock: MockClock) -> None:
    channel = Channel[int]("raw", int, 2)
    sender, receiver = channel.sender(), channel.receiver()

    async def produce() -> None:
        for number in range(4):
            await sender.send(number)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(produce)
        await trio.sleep(3.0)
        full = channel.statistics()
        assert (full.name, full.capacity, full.depth, full.senders_waiting) == ("raw", 2, 2, 1)
        for _ in range(4):
            await receiver.receive()
    with trio.move_on_after(2.0):
        await receiver.receive()
    after = channel.statistics()
    assert (after.depth, after.peak, after.sent, after.received) == (0, 2, 4, 4)
    assert (after.send_wait, after.receive_wait) == (3.0, 2.0)
    assert (after.senders_waiting, after.receivers_waiting) == (0, 0)
