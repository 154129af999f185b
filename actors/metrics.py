"""What a run leaves to read: one JSON line per step, sampled episodes, a trace, a log; and how it is read back.

Knows the files' form and the names of what is averaged over episodes. Does not know who measures, and reads no clock
but the one it is given.
"""

import contextlib
import io
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import numpy as np
import trio

from trouper.actors.progress import Screen
from trouper.actors.run_directory import LIFE_LINE, RunDirectory
from trouper.actors.summary import BY_LENGTH, Usage, closing
from trouper.actors.trace import Trace
from trouper.channels import Episode, Group, RunError

_EVALUATION = "eval/"
_BLOCK = 1 << 16
_COUNTERS = {"reward/mean", "async/staleness_mean", "async/staleness_max", "throughput/tokens_per_s"}
"""Metrics that the trace shows too, once a step."""


class Recorder:
    """Writes a run's metrics, episodes and log, and tells the screen.

    Several calls for one step are one record to a reader: within a life, later values are added to earlier ones.
    Lines are flushed at once, so a kill loses at most the line it interrupts, and the next life cuts that one off.

    Args:
        run: where to.
        life: grows each time the run goes on after an end, also within a process; readers take the newest life's
            records.
        screen: told of every step and note.
        clock: seconds; only differences are used.
        episodes_per_step: most episodes of a step that are written.

    Attributes:
        trace: for spans and counters; its times are those of the log.
        usage: asked at the end where the time went, if somebody took account of it.
    """

    def __init__(
        self,
        run: RunDirectory,
        life: int,
        screen: Screen,
        clock: Callable[[], float] = trio.current_time,
        episodes_per_step: int = 2,
    ) -> None:
        self.curve: list[tuple[int, float]] = []
        self.evaluated: dict[int, dict[str, float]] = {}
        """Evaluations by their weights' step, until somebody takes them out."""
        self._screen = screen
        self._clock = clock
        self._episodes_per_step = self._episodes_left = episodes_per_step
        self._episodes_step: int | None = None
        self._started = self._recorded = clock()
        self.usage: Callable[[], Usage | None] = lambda: None
        self._lengths: Counter[str] = Counter()
        self._metrics = _append_to(run.metrics)
        self._episodes = _append_to(run.episodes)
        self._log_file = _append_to(run.log)
        self.trace = Trace(run.trace, clock)
        self._lives = self.trace.track("run")
        self.begin_life(life)

    def begin_life(self, life: int) -> None:
        """What is recorded from now on belongs to another life of the run."""
        self.life = life
        self._lives.mark(f"life {life}")
        self._write(self._log_file, f"{LIFE_LINE}{life}")

    @property
    def elapsed(self) -> float:
        """Seconds since the recorder was made."""
        return self._clock() - self._started

    def record(self, step: int, metrics: Mapping[str, float], life: int | None = None) -> None:
        """Write a step's metrics.

        Args:
            step: number of optimizer steps taken; an evaluation's metrics go under the step of the weights it tried.
            metrics: numbers by name; one that is not finite is written as null.
            life: of the weights, where that may not be the present one.
        """
        elapsed = self.elapsed
        numbers = {name: float(value) for name, value in metrics.items()}
        training = not _is_evaluation(numbers)
        if training:
            numbers |= self._rate(numbers)
            for name in _COUNTERS & numbers.keys():
                if math.isfinite(numbers[name]):
                    self.trace.counter(name, numbers[name])
        of = self.life if life is None else life
        line: dict[str, float | None] = {"step": step, "life": of, "time": round(elapsed, 3)}
        line |= {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self._write(self._metrics, json.dumps(line, allow_nan=False))
        if training:
            self._lengths.update({name: int(numbers[name]) for name in numbers if name.startswith(BY_LENGTH)})
            while self.curve and self.curve[-1][0] >= step:  # of an earlier life
                self.curve.pop()
            self.curve.append((step, numbers.get("reward/mean", math.nan)))
            self._screen.step(step, elapsed, numbers)
        else:
            self.evaluated[step] = numbers
            values = ", ".join(f"{name} {value:.3f}" for name, value in sorted(numbers.items()))
            self.note(f"step {step}: {values}")

    def update(self, metrics: Mapping[str, float]) -> None:
        """Show newer values without writing them."""
        self._screen.update(self.elapsed, metrics)

    def episodes(self, step: int, group: Group) -> None:
        """Write a group's episodes for readers, as far as the step's share is not used up.

        Args:
            step: as in `record`.
            group: best and worst are written first, since those show what is being learned.
        """
        if step != self._episodes_step:
            self._episodes_step, self._episodes_left = step, self._episodes_per_step
        order = sorted(range(len(group.episodes)), key=lambda index: float(group.advantages[index]))
        ends = [index for pair in zip(reversed(order), order, strict=True) for index in pair]
        for index in list(dict.fromkeys(ends))[: self._episodes_left]:
            self._episodes_left -= 1
            line = _readable(step, self.life, group.episodes[index], float(group.advantages[index]))
            self._write(self._episodes, json.dumps(line, allow_nan=False, ensure_ascii=False))

    def note(self, text: str) -> None:
        """Write to the log, and show."""
        self.log(text)
        self._screen.note(text)

    def log(self, text: str) -> None:
        """Write to the log alone, with seconds since the start: what may come often."""
        self._write(self._log_file, f"{self.elapsed:10.3f} {text}")

    def summary(self) -> str:
        """The closing summary so far."""
        return closing(self.curve, self.elapsed, self.usage(), self._lengths)

    def close(self) -> None:
        """Write and show the closing summary, and close the files."""
        if not self._log_file.closed:
            text = self.summary()
            self.trace.close()
            try:
                self._write(self._log_file, text)
            finally:
                self._screen.close(text)
            for file in (self._metrics, self._episodes, self._log_file):
                with contextlib.suppress(OSError):  # a write that failed was told then, and fails once more here
                    file.close()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, t: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _rate(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Trained tokens per second since the last training record."""
        now = self._clock()
        since, self._recorded = now - self._recorded, now
        tokens = numbers.get("completions/tokens")
        return {"throughput/tokens_per_s": tokens / since} if tokens is not None and since > 0 else {}

    def _write(self, file: TextIO, line: str) -> None:
        try:
            file.write(line + "\n")
            file.flush()
        except OSError as error:
            raise RunError(f"{file.name} cannot be written: {error}; make room and go on with --resume") from error


def step_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    """What a step's groups say about its episodes.

    Args:
        groups: all of the step's, void ones too.
        step: the step number of the weights that are about to be updated; ages are counted from it.

    Returns:
        Counts, and means over episodes; a name appears only where there is something to count or average.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    numbers: dict[str, float] = {"groups": len(groups), "episodes": len(episodes)}
    for reason in sorted({group.void for group in groups if group.void is not None}):
        numbers[f"async/void/{reason}"] = sum(group.void == reason for group in groups)
    if lost := sum(group.lost for group in groups):
        numbers["async/lost_members"] = lost
    if not episodes:
        return numbers
    return numbers | _reward_metrics(groups, episodes) | _length_metrics(episodes, step) | _own_metrics(episodes)


def read_metrics(path: str | Path) -> dict[int, dict[str, Any]]:
    """Every step's record, in order of steps, as the newest life has it.

    A life that went on at step `c` supersedes what older lives wrote about steps it did not build on: all after `c`.
    Evaluations are records of their own, since an older life's may belong to a step that was kept.

    Returns:
        step -> metrics, with `step`, `life` and `time` of the training record; numbers that were not finite are None.

    Raises:
        ValueError: a line in the middle of the file is not JSON; the file and the line are named.
    """
    lines = list(_lines(Path(path)))
    first: dict[int, int] = {}
    for line in lines:
        if not _is_evaluation(line):
            life = line["life"]
            first[life] = min(first.get(life, line["step"]), line["step"])
    steps: dict[int, dict[bool, dict[str, Any]]] = defaultdict(dict)
    for line in lines:
        step, life, evaluation = line["step"], line["life"], _is_evaluation(line)
        if any(newer > life and step >= start for newer, start in first.items()):
            continue
        known = steps[step].get(evaluation)
        if known is None or known["life"] < life:
            steps[step][evaluation] = line
        elif known["life"] == life:
            known.update(line)
    return {step: steps[step].get(True, {}) | steps[step].get(False, {}) for step in sorted(steps)}


def _reward_metrics(groups: Sequence[Group], episodes: Sequence[Episode]) -> dict[str, float]:
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    numbers: dict[str, float] = {}
    if rewards:
        numbers["reward/mean"] = float(np.mean(rewards))
        numbers["reward/std"] = float(np.std(rewards))
    if unscored := len(episodes) - len(rewards):
        numbers["reward/unscored"] = unscored
    equal = []
    for group in groups:
        if group.episodes:
            scored = [episode.reward for episode in group.episodes if episode.reward is not None]
            # Compared, not subtracted from a mean: equal rewards have a rounding deviation.
            equal.append(not scored or min(scored) == max(scored))
    numbers["reward/frac_zero_std"] = float(np.mean(equal))
    return numbers


def _length_metrics(episodes: Sequence[Episode], step: int) -> dict[str, float]:
    lengths = [episode.sampled for episode in episodes]
    rows = [row for episode in episodes for row in episode.rows]
    ages = np.concatenate([np.zeros(0, np.int32), *(step - row.versions[row.loss_mask] for row in rows)])
    numbers = {
        "completions/mean_length": float(np.mean(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/tokens": float(sum(lengths)),
        "completions/clipped_ratio": float(np.mean([episode.status != "done" for episode in episodes])),
        "num_turns/mean": float(np.mean([episode.turns for episode in episodes])),
    }
    for status in sorted({episode.status for episode in episodes} - {"done"}):
        numbers[f"completions/status/{status}"] = float(np.mean([episode.status == status for episode in episodes]))
    if ages.size:
        numbers["async/staleness_mean"] = float(ages.mean())
        numbers["async/staleness_max"] = float(ages.max())
    return numbers


def _own_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Means of what environments, agents and reward functions named, over the episodes that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for name, value in episode.metrics.items():
            values[f"{name}/mean" if name.startswith("rewards/") else name].append(value)
        for name, value in episode.timings.items():
            values[f"time/episode/{name}"].append(value)
    return {name: float(np.mean(each)) for name, each in sorted(values.items())}


def _readable(step: int, life: int, episode: Episode, advantage: float) -> dict[str, Any]:
    def number(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    return {
        "step": step,
        "life": life,
        "attempt": episode.attempt.id,
        "slot": episode.attempt.slot,
        "task": episode.attempt.task.id,
        "status": episode.status,
        "reward": number(episode.reward),
        "advantage": number(advantage),
        "turns": episode.turns,
        "tokens": episode.sampled,
        "metrics": {name: number(value) for name, value in episode.metrics.items()},
        "messages": [{"role": message.role, "content": message.content} for message in episode.messages],
    }


def _append_to(path: Path) -> TextIO:
    """Open for appending, after a last line that a kill left without an end is cut off."""
    file = path.open("a+b")
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(end - _BLOCK, 0)
        file.seek(start)
        line_end = file.read(end - start).rfind(b"\n")
        if line_end >= 0:
            end = start + line_end + 1
            break
        end = start
    file.truncate(end)
    return io.TextIOWrapper(file, encoding="utf-8", newline="\n")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    content = path.read_text(encoding="utf-8")
    # What follows the last line end is a line that is being written, or never was finished.
    for number, text in enumerate(content.split("\n")[:-1], start=1):
        try:
            yield json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}; the file was edited or damaged") from error


def _is_evaluation(line: Mapping[str, Any]) -> bool:
    names = line.keys() - {"step", "life", "time"}
    return bool(names) and all(name.startswith(_EVALUATION) for name in names)
