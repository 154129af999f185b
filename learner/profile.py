"""A `jax.profiler` trace of chosen training steps, on demand. Knows step numbers and a folder, no learner."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax

from trouper.channels import ConfigError

T = TypeVar("T")


class StepProfile:
    """Traces the steps from `first` to `last`, for TensorBoard, XProf or Perfetto.

    Every call belongs on the thread that drives the devices.

    Args:
        folder: where the trace goes.
        first: first step to trace.
        last: last step to trace, included.
    """

    def __init__(self, folder: Path, first: int, last: int) -> None:
        if not 0 <= first <= last:
            raise ConfigError(f"profile steps [{first}, {last}]; give the first and the last, 0 or more")
        self._folder = folder
        self._steps = range(first, last + 1)
        self._running = False

    @contextmanager
    def call(self, step: int) -> Iterator[None]:
        """Around each device call of a step; the trace starts at the first call of `first`.

        Args:
            step: of the call.
        """
        if step in self._steps and not self._running:
            jax.profiler.start_trace(self._folder)
            self._running = True
        elif step not in self._steps:
            self.close()
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield

    def run(self, step: int, call: Callable[..., T], *args: Any) -> T:
        """`call(*args)` as a device call of a step."""
        with self.call(step):
            return call(*args)

    def close(self) -> None:
        """End the trace and write it, if one runs: after `last`, or when the run ends before."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()  # type: ignore[no-untyped-call]
