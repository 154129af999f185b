"""The only place where Trio meets JAX: device calls run one at a time on a thread that bears the device's name.

A device call cannot be interrupted, so a cancelled caller waits until it has returned. Simulations put an
accelerator in its place that spends virtual time instead.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import trio

T = TypeVar("T")


class Accelerator(Protocol):
    """Runs device calls in order."""

    @property
    def busy_seconds(self) -> float:
        """Time spent in device calls so far."""

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        """Run `call(*args)` and return its result; waits while another call runs."""


class DeviceThread:
    """An accelerator behind a named thread.

    Contexts such as `jax.default_matmul_precision` do not cross into the thread: enter them inside the call.

    Args:
        name: of the thread, as debuggers and traces show it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.busy_seconds = 0.0
        self._limiter = trio.CapacityLimiter(1)

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        """Run `call(*args)` on the thread. Never abandoned: the device would go on using donated arrays."""
        started: list[float] = []

        def timed() -> T:
            started.append(clock())
            return call(*args)

        clock = trio.lowlevel.current_clock().current_time
        try:
            return await trio.to_thread.run_sync(timed, thread_name=self.name, limiter=self._limiter)
        finally:
            if started:
                self.busy_seconds += clock() - started[0]
