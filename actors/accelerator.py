"""The only place where Trio meets JAX: device calls run one at a time on a thread that bears the device's name.

A device call cannot be interrupted, so a cancelled caller waits until it has returned, within reason. Simulations put
an accelerator in its place that spends virtual time instead.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import outcome
import trio

from trouper.channels import RunError

T = TypeVar("T")

PATIENCE = 600.0
"""Seconds that a cancelled caller waits for its call: some compile for minutes, and a wedged one never returns."""


class Accelerator(Protocol):
    """Runs device calls in order."""

    @property
    def busy_seconds(self) -> float:
        """Time spent in device calls so far."""

    @property
    def running(self) -> tuple[str, float] | None:
        """The call that runs now, and the time it began."""

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        """Run `call(*args)` and return its result; waits while another call runs."""


class DeviceThread:
    """An accelerator behind a named thread.

    Contexts such as `jax.default_matmul_precision` do not cross into the thread: enter them inside the call.

    Args:
        name: of the thread, as debuggers and traces show it.

    Attributes:
        busy_seconds: time spent in calls that have returned.
        running: the call that runs now, and the time it began.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.busy_seconds = 0.0
        self.running: tuple[str, float] | None = None
        self._one_at_a_time = trio.Lock()

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        """Run `call(*args)` on the thread and return its result, also to a caller that was cancelled meanwhile.

        Left alone, a call would go on using arrays that others donate: it is given up only when it has not returned
        `PATIENCE` seconds after the cancellation, and the device with it.

        Raises:
            RunError: this call or an earlier one never returned.
        """
        async with self._one_at_a_time:
            if self.running is not None:
                raise self._given_up(f"{name_of(call)} cannot run")
            returned = trio.Event()
            result: list[outcome.Outcome[T]] = []

            def returns(with_result: outcome.Outcome[T]) -> None:
                result.append(with_result)
                returned.set()

            def deliver(with_result: outcome.Outcome[T]) -> None:
                with contextlib.suppress(trio.RunFinishedError):  # given up, and the run is over
                    token.run_sync_soon(returns, with_result)

            token, started = trio.lowlevel.current_trio_token(), trio.current_time()
            trio.lowlevel.start_thread_soon(functools.partial(call, *args), deliver, self.name)
            self.running = (name_of(call), started)
            try:
                await returned.wait()
            except trio.Cancelled:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + PATIENCE):
                    await returned.wait()
                if not result:
                    raise self._given_up(f"its caller was cancelled {PATIENCE:g} s ago") from None
            self.running = None
            self.busy_seconds += trio.current_time() - started
            return result.pop().unwrap()  # popped: this frame must not keep an error that keeps this frame

    def _given_up(self, what: str) -> RunError:
        assert self.running is not None
        call, started = self.running
        return RunError(
            f"device {self.name!r} has not returned from {call} for {trio.current_time() - started:.0f} s, and {what}. "
            "The call is given up and the device with it: look at the driver's log, and start the process again"
        )


def name_of(call: Callable[..., Any]) -> str:
    """What errors and traces call a device call."""
    while isinstance(call, functools.partial):
        call = call.func
    return getattr(call, "__qualname__", type(call).__qualname__)
