"""One run's place on disk: who may write to it, and with which configuration it goes on.

Knows names of files, not their contents: metrics and checkpoints belong to the parts that write them.
"""

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from trouper.actors.config import RunConfig
from trouper.actors.config_file import dump_config, flatten, load_config
from trouper.channels import ConfigError

LIFE_LINE = "-- life "
"""How a life of the run begins its part of the log."""

_FIXED = (
    "model.source",
    "model.scratch",
    "model.param_dtype",
    "optimizer.name",
    "chat",
    "tasks",
    "run.seed",
    "rollout.num_generations",
    "train.groups_per_step",
)
"""What checkpoints and the training order are made of: a run that goes on cannot change it."""

_ASIDE = ("run", "log", "checkpoint", "evaluation", "placement", "train.max_steps", "rollout.max_concurrency")
"""What has no part in which weights a step's groups lead to."""


class RunDirectory:
    """A run directory, locked for as long as it is entered. The lock ends with the process, however that ends.

    Layout: `config.toml` (resolved), `metrics.jsonl`, `episodes.jsonl`, `log.txt`, `trace.perfetto-trace`,
    `checkpoints/`, `ledger/`, `lock`.

    Args:
        path: the directory; made when a run is created in it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.episodes = self.path / "episodes.jsonl"
        self.log = self.path / "log.txt"
        self.trace = self.path / "trace.perfetto-trace"
        self.checkpoints = self.path / "checkpoints"
        self.ledger = self.path / "ledger"
        self._lock_file = self.path / "lock"
        self._lock: int | None = None

    def create(self, config: RunConfig) -> None:
        """Start a new run here and take the lock.

        Raises:
            ConfigError: there is a run here already, another process is writing here, or nothing can be written.
        """
        try:
            self._refuse_contents()
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock()
            # Another process may have started a run between the look and the lock.
            self._refuse_contents()
            self.keep(config)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot hold a run: {error}; choose another --run-dir") from error

    def resume(self, config: RunConfig) -> dict[str, tuple[Any, Any]]:
        """Go on with the run that is here, and take the lock. `keep` the configuration once the start has succeeded.

        Returns:
            What the given configuration changes: the stored and the given value by dotted key.

        Raises:
            ConfigError: there is no run here, another process is writing here, or the given configuration changes
                what a run cannot change; all such keys are named.
        """
        if not self.config.is_file():
            raise ConfigError(f"there is no run in {self.path} to go on with; leave --resume out to start one")
        self.lock()
        changes = differences(load_config(self.config), config)
        fixed = {key: values for key, values in changes.items() if _is_among(key, _FIXED)}
        if fixed:
            lines = [f"  {key}: the run has {before!r}, given is {after!r}" for key, (before, after) in fixed.items()]
            raise ConfigError(
                f"{self.path} cannot go on with this configuration, since these keys decide what its checkpoints and "
                "its order of tasks mean:\n" + "\n".join(lines) + "\nput them back, or start another run (--run-dir)"
            )
        return changes

    def lives(self) -> int:
        """How many lives of the run have written to its log."""
        if not self.log.exists():
            return 0
        with self.log.open(encoding="utf-8", errors="replace") as lines:
            return sum(line.startswith(LIFE_LINE) for line in lines)

    def lock(self) -> None:
        """Take the directory for this process, until `close`.

        Raises:
            ConfigError: another process has it.
        """
        if self._lock is not None:
            return
        descriptor = os.open(self._lock_file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise ConfigError(
                f"{self.path} is in use by another run (process {holder}); wait for it, or choose another --run-dir"
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._lock = descriptor

    def close(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, t: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _refuse_contents(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file; a run needs a directory: choose another --run-dir")
        names = sorted(each.name for each in self.path.iterdir()) if self.path.exists() else []
        # A start that was refused, or killed before it had written its configuration, leaves nothing but these.
        if set(names) - {self._lock_file.name, f"{self.config.name}.part"}:
            what = "a run" if self.config.name in names else "something else"
            advice = "use --resume to go on with it, " if self.config.name in names else ""
            raise ConfigError(
                f"{self.path} holds {what} already ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''}); "
                f"{advice}choose another --run-dir, or delete it"
            )

    def keep(self, config: RunConfig) -> None:
        """Write the configuration with which the run goes on."""
        # A reader, and a resume after a kill, sees the old file or the new one, never half of one.
        half = self.config.with_suffix(".toml.part")
        with half.open("w", encoding="utf-8") as file:
            file.write(dump_config(config))
            file.flush()
            os.fsync(file.fileno())
        half.replace(self.config)


def differences(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """What two configurations do not agree about: both values by dotted key."""
    old, new = flatten(before), flatten(after)
    keys = list(dict.fromkeys([*old, *new]))
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def changes_learning(key: str) -> bool:
    """Whether other weights may follow from the same groups when this key changes."""
    return not _is_among(key, _ASIDE)


def _is_among(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == each or key.startswith(f"{each}.") for each in sections)
