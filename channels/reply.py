"""What travels backwards, and therefore never blocks its sender: one-shot replies and latest-wins values."""

from typing import Generic, TypeVar

import trio

T = TypeVar("T")


class Reply(Generic[T]):
    """One answer to one request. The answering side calls `set` or `fail` once; later calls are ignored.

    Ignoring is right: a request that was retried elsewhere may be answered twice, and the first answer stands.
    """

    __slots__ = ("_done", "_error", "_value")

    def __init__(self) -> None:
        self._done = trio.Event()
        self._value: T | None = None
        self._error: BaseException | None = None

    @property
    def answered(self) -> bool:
        """Whether an answer or an error is there."""
        return self._done.is_set()

    def set(self, value: T) -> None:
        """Answer."""
        if not self._done.is_set():
            self._value = value
            self._done.set()

    def fail(self, error: BaseException) -> None:
        """Answer with an error, raised in the waiting task."""
        if not self._done.is_set():
            self._error = error
            self._done.set()

    async def wait(self) -> T:
        """The answer, or the error it failed with."""
        await self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # None is a legal T


class Latest(Generic[T]):
    """A value of which only the newest matters. Setting never blocks; readers wait for a change."""

    def __init__(self, value: T) -> None:
        self._value = value
        self._changes = 0
        self._lot = trio.lowlevel.ParkingLot()

    @property
    def value(self) -> T:
        """The newest value."""
        return self._value

    @property
    def changes(self) -> int:
        """How often it was set; pass it to `wait` to wait for the next change."""
        return self._changes

    def set(self, value: T) -> None:
        """Replace the value and wake the readers."""
        self._value = value
        self._changes += 1
        self._lot.unpark_all()

    async def wait(self, after: int) -> T:
        """The newest value, as soon as it was set more than `after` times."""
        while self._changes <= after:
            await self._lot.park()
        return self._value
