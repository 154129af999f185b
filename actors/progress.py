"""What a person sees while a run goes on: a live panel on a terminal, sparse plain lines anywhere else.

Knows names of metrics, not where they come from. Nothing here runs by itself: the picture changes when it is told
something, so no thread is left behind that could keep a process alive.
"""

import contextlib
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trouper.actors.summary import duration, sparkline

_SHOWN = (
    ("reward/mean", "reward", "{:.3f}"),
    ("throughput/tokens_per_s", "tok/s", "{:.0f}"),
    ("async/staleness_mean", "staleness", "{:.2f}"),
    ("completions/mean_length", "length", "{:.0f}"),
    ("grad_norm", "grad norm", "{:.3g}"),
)
"""Metrics in the order in which they are shown, with their short names."""

_CURVE = 40
"""Steps in the live curve."""


class Screen(Protocol):
    """What the recorder tells."""

    def step(self, step: int, elapsed: float, metrics: Mapping[str, float]) -> None:
        """An optimizer step is done; `elapsed` seconds after the start."""

    def update(self, elapsed: float, metrics: Mapping[str, float]) -> None:
        """Newer values in the middle of a step: queue depths, tokens per second."""

    def note(self, text: str) -> None:
        """Something a person should read."""

    def close(self, summary: str) -> None:
        """The end."""


def open_screen(total: int | None, done: int = 0, stream: TextIO | None = None) -> "Screen":
    """The right screen for where the text goes.

    Args:
        total: steps the run will take, where that is known.
        done: steps that were taken before this start.
        stream: stderr when None.
    """
    stream = cast(TextIO, Unbreakable(stream or sys.stderr))
    if stream.isatty():
        return LiveScreen(Console(file=stream), total, done)
    return PlainScreen(lambda line: print(line, file=stream, flush=True), total, done)


class Unbreakable:
    """A stream that falls silent when its reader has gone: a closed pipe or terminal is no reason to end a run.

    Args:
        stream: the real one.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        """Everything else is the real stream's."""
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, if somebody reads."""
        try:
            return self._stream.write(text)
        except OSError:
            self._fall_silent()
        return len(text)

    def flush(self) -> None:
        """Flush, if somebody reads."""
        try:
            self._stream.flush()
        except OSError:
            self._fall_silent()

    def _fall_silent(self) -> None:
        # What is left in the buffer would fail again when the process ends, and change its exit code.
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


class Progress:
    """Numbers that both screens show: the newest metrics, and how long it will take.

    Args:
        total: steps the run will take, where that is known.
        done: steps that were taken before this start.
    """

    def __init__(self, total: int | None, done: int) -> None:
        self._total = total
        self._first = self._step = done
        self._elapsed = 0.0
        self._at_step = 0.0
        self._metrics: dict[str, float] = {}
        self._rewards: list[float] = []

    def step(self, step: int, elapsed: float, metrics: Mapping[str, float]) -> None:
        """Take in a finished step."""
        self._step, self._at_step = step, elapsed
        self.update(elapsed, metrics)
        self._rewards = [*self._rewards, metrics.get("reward/mean", math.nan)][-_CURVE:]

    def update(self, elapsed: float, metrics: Mapping[str, float]) -> None:
        """Take in newer values."""
        self._elapsed = elapsed
        self._metrics.update(metrics)

    def remaining(self) -> float | None:
        """Seconds until the last step at the pace so far; None before the first step and without an end."""
        taken = self._step - self._first
        if self._total is None or taken <= 0:
            return None
        return max(self._at_step / taken * (self._total - self._step) - (self._elapsed - self._at_step), 0.0)

    def position(self) -> str:
        """`step 3/100`."""
        return f"step {self._step}" + (f"/{self._total}" if self._total is not None else "")

    def values(self) -> list[tuple[str, str]]:
        """Short names and values of what is known."""
        shown = [
            (label, pattern.format(self._metrics[name]))
            for name, label, pattern in _SHOWN
            if math.isfinite(self._metrics.get(name, math.nan))
        ]
        lost = sum(number for name, number in self._metrics.items() if name.startswith("env/failures/"))
        return [*shown, ("lost", f"{lost:.0f}")] if lost else shown

    def queues(self) -> list[tuple[str, int]]:
        """Names and depths of channels."""
        return [
            (name.removeprefix("queue/").removesuffix("/depth"), int(value))
            for name, value in sorted(self._metrics.items())
            if name.startswith("queue/") and name.endswith("/depth") and math.isfinite(value)
        ]

    def curve(self) -> str:
        """The last rewards."""
        return sparkline(self._rewards, _CURVE)

    def timing(self) -> str:
        """`3 min 20 s, 12 min 05 s left`."""
        left = self.remaining()
        return duration(self._elapsed) + (f", {duration(left)} left" if left is not None else "")


class PlainScreen:
    """One line per step, but at most one every few seconds; notes at once. For files, pipes and CI.

    Args:
        write: prints one line.
        total: steps the run will take, where that is known.
        done: steps that were taken before this start.
        interval: least seconds between two step lines; first and last step always get one.
    """

    def __init__(self, write: Callable[[str], None], total: int | None, done: int = 0, interval: float = 5.0) -> None:
        self._write = write
        self._total = total
        self._interval = interval
        self._progress = Progress(total, done)
        self._written = -math.inf

    def step(self, step: int, elapsed: float, metrics: Mapping[str, float]) -> None:
        """A line, if the last one is long enough ago."""
        self._progress.step(step, elapsed, metrics)
        if elapsed - self._written >= self._interval or step == self._total:
            self._written = elapsed
            values = [f"{label} {value}" for label, value in self._progress.values()]
            self._write(" · ".join([self._progress.position(), *values, self._progress.timing()]))

    def update(self, elapsed: float, metrics: Mapping[str, float]) -> None:
        """Kept for the next line."""
        self._progress.update(elapsed, metrics)

    def note(self, text: str) -> None:
        """A line of its own."""
        self._write(text)

    def close(self, summary: str) -> None:
        """The summary."""
        self._write(summary)


class LiveScreen:
    """A panel at the bottom of a terminal, from the first number on; notes scroll above it.

    Args:
        console: the terminal.
        total: steps the run will take, where that is known.
        done: steps that were taken before this start.
    """

    def __init__(self, console: Console, total: int | None, done: int = 0) -> None:
        self._console = console
        self._progress = Progress(total, done)
        # Redirected streams would keep what a crashing run prints; auto refresh would be a thread.
        self._live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )

    def step(self, step: int, elapsed: float, metrics: Mapping[str, float]) -> None:
        """Redraw."""
        self._progress.step(step, elapsed, metrics)
        self._draw()

    def update(self, elapsed: float, metrics: Mapping[str, float]) -> None:
        """Redraw."""
        self._progress.update(elapsed, metrics)
        self._draw()

    def note(self, text: str) -> None:
        """A line above the panel."""
        self._console.print(Text(text))

    def close(self, summary: str) -> None:
        """The summary in the panel's place."""
        self._live.stop()
        self._console.print(Text(summary))

    def _draw(self) -> None:
        if not self._live.is_started:
            self._live.start()
        panel = Table.grid(padding=(0, 1))
        panel.add_row(Text(self._progress.position(), style="bold"), Text(self._progress.timing()))
        panel.add_row("", Text(" · ".join(f"{label} {value}" for label, value in self._progress.values())))
        if queues := self._progress.queues():
            panel.add_row("queues", Text(" · ".join(f"{name} {depth}" for name, depth in queues)))
        if curve := self._progress.curve():
            panel.add_row("reward", Text(curve, style="green"))
        self._live.update(panel, refresh=True)
