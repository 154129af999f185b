"""Named bounded channels: the only way data moves forward, and the only backpressure.

A `Channel` belongs to whoever made it (the graph). It keeps a spare sender and a spare receiver, so an actor that
crashes leaves its neighbours waiting, not facing a closed pipe. Actors get clones. When every producer has
ended for good, the owner calls `finish()`: receivers then see the end of the data once the buffer is empty.
When all who use it begin again, the owner calls `renew()`: nothing of what was sent before reaches them.
"""

from types import TracebackType
from typing import Any, Generic, TypeVar

import trio
from msgspec import Struct

T = TypeVar("T")

MESSAGES_IN_A_ROW = 64
"""Messages that a receiver takes at most, when they are there already, before it lets other tasks run."""


class ChannelStatistics(Struct, frozen=True):
    """A channel at one moment.

    Attributes:
        name: the channel's name.
        capacity: most messages that wait in it.
        depth: messages waiting now.
        peak: most that ever waited.
        sent: messages sent so far.
        received: messages received so far.
        send_wait: seconds that producers have spent in `send`, all together: backpressure.
        receive_wait: seconds that consumers have spent in `receive`, all together: starvation.
        senders_waiting: tasks blocked in `send` now.
        receivers_waiting: tasks blocked in `receive` now.
    """

    name: str
    capacity: int
    depth: int
    peak: int
    sent: int
    received: int
    send_wait: float
    receive_wait: float
    senders_waiting: int
    receivers_waiting: int


class Channel(Generic[T]):
    """A bounded pipe of one message type.

    Args:
        name: how errors, metrics and drawings call it.
        message_type: what it carries; the graph checks that both ends agree.
        capacity: most messages that wait in it; 0 makes every send a handover.
    """

    def __init__(self, name: str, message_type: Any, capacity: int) -> None:
        if not isinstance(capacity, int) or capacity < 0:
            raise ValueError(f"channel {name!r} was given capacity {capacity}; it must be a whole number, 0 or more")
        self.name = name
        self.message_type = message_type
        self.capacity = capacity
        self._send, self._receive = trio.open_memory_channel[T](capacity)
        self._peak = self._sent = self._received = 0
        self._send_wait = self._receive_wait = 0.0

    def sender(self) -> "Sender[T]":
        """A new sending end."""
        return Sender(self, self._send.clone())

    def receiver(self) -> "Receiver[T]":
        """A new receiving end; several share the messages between them."""
        return Receiver(self, self._receive.clone())

    def finish(self) -> None:
        """Drop the spare sender: when all lent senders are closed too, receivers see the end."""
        self._send.close()

    def abandon(self) -> None:
        """Drop the spare receiver: when all lent receivers are closed too, sending raises trio.BrokenResourceError."""
        self._receive.close()

    def renew(self) -> None:
        """Begin again, empty and open; ends lent before belong to the old pipe, and counts go on growing."""
        self.close()
        self._send, self._receive = trio.open_memory_channel[T](self.capacity)

    @property
    def ended(self) -> bool:
        """Whether no message can come any more: it was finished, every lent sender is closed, the buffer is empty."""
        inner = self._send.statistics()
        return inner.open_send_channels == 0 and inner.current_buffer_used == 0

    def close(self) -> None:
        """Drop both spare ends; what still waits in the channel is gone when the last receiver closes."""
        self._send.close()
        self._receive.close()

    def statistics(self) -> ChannelStatistics:
        """Depth, peak and waits."""
        inner = self._receive.statistics()
        return ChannelStatistics(
            name=self.name,
            capacity=self.capacity,
            depth=inner.current_buffer_used,
            peak=self._peak,
            sent=self._sent,
            received=self._received,
            send_wait=self._send_wait,
            receive_wait=self._receive_wait,
            senders_waiting=inner.tasks_waiting_send,
            receivers_waiting=inner.tasks_waiting_receive,
        )


class Sender(Generic[T]):
    """The sending end an actor holds. Closing it ends only this end."""

    def __init__(self, channel: Channel[T], inner: "trio.MemorySendChannel[T]") -> None:
        self._channel = channel
        self._inner = inner

    @property
    def name(self) -> str:
        """The channel's name."""
        return self._channel.name

    async def send(self, message: T) -> None:
        """Hand over a message; waits while the channel is full. A cancelled send leaves nothing behind.

        While there is room the sender goes on at once: no other task runs before it waits for something.
        """
        channel = self._channel
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            self._inner.send_nowait(message)
        except trio.WouldBlock:
            started = trio.current_time()
            try:
                await self._inner.send(message)
            finally:
                channel._send_wait += trio.current_time() - started
        channel._sent += 1
        # What waits is never more than this, and looking costs as much as sending.
        if channel._sent - channel._received > channel._peak:
            channel._peak = max(channel._peak, self._inner.statistics().current_buffer_used)

    def clone(self) -> "Sender[T]":
        """A second end of the same channel, for a second producer."""
        return Sender(self._channel, self._inner.clone())

    def close(self) -> None:
        """Close this end."""
        self._inner.close()

    def __enter__(self) -> "Sender[T]":
        return self

    def __exit__(self, t: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Receiver(Generic[T]):
    """The receiving end an actor holds. `async for` ends when the data ends."""

    def __init__(self, channel: Channel[T], inner: "trio.MemoryReceiveChannel[T]") -> None:
        self._channel = channel
        self._inner = inner
        self._turn = 0

    @property
    def name(self) -> str:
        """The channel's name."""
        return self._channel.name

    async def receive(self) -> T:
        """The next message; waits while there is none.

        Raises:
            trio.EndOfChannel: every sender is closed and the buffer is empty.
        """
        self._turn += 1
        if self._turn % MESSAGES_IN_A_ROW:
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            await trio.lowlevel.checkpoint()
        channel = self._channel
        try:
            message = self._inner.receive_nowait()
        except trio.WouldBlock:
            started = trio.current_time()
            try:
                message = await self._inner.receive()
            finally:
                channel._receive_wait += trio.current_time() - started
        channel._received += 1
        return message

    def receive_nowait(self) -> T:
        """The next message, or `trio.WouldBlock`."""
        message = self._inner.receive_nowait()
        self._channel._received += 1
        return message

    def __aiter__(self) -> "Receiver[T]":
        return self

    async def __anext__(self) -> T:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None

    def clone(self) -> "Receiver[T]":
        """A second end of the same channel, for a second consumer."""
        return Receiver(self._channel, self._inner.clone())

    def close(self) -> None:
        """Close this end."""
        self._inner.close()

    def __enter__(self) -> "Receiver[T]":
        return self

    def __exit__(self, t: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
