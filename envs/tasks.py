"""Task streams: which task the draw number `n` is. Pure functions, so that a resumed run sees the same tasks.

Does not know slots, groups or how far a run has come.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trouper.channels import ConfigError, Task
from trouper.envs.dotted import made


class Tasks(Protocol):
    """A stream of tasks."""

    def task(self, draw: int) -> Task | None:
        """The task of a draw number, from 0, always the same; None when the data has ended before it."""


class TaskList:
    """Tasks that are all known, drawn epoch after epoch.

    Args:
        tasks: at least one.
        seed: of the order.
        shuffle: a new order for each epoch, else the given one.
        epochs: how often the tasks are gone through; None never ends.
    """

    def __init__(
        self, tasks: Sequence[Task], *, seed: int = 0, shuffle: bool = True, epochs: int | None = None
    ) -> None:
        if not tasks:
            raise ConfigError("a list of tasks is empty; there is nothing to train on")
        self._tasks = tasks
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        """Number of tasks, which is the number of draws of one epoch."""
        return len(self._tasks)

    def task(self, draw: int) -> Task | None:
        """The task of a draw number; None after the last epoch."""
        epoch, place = divmod(draw, len(self._tasks))
        if self._epochs is not None and epoch >= self._epochs:
            return None
        if not self._shuffle:
            return self._tasks[place]
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng((self._seed, epoch)).permutation(len(self._tasks)).tolist())
        return self._tasks[self._order[1][place]]


class JsonlTasks(TaskList):
    """Tasks from a file of one JSON object a line.

    A record's fields are the payload, kept as they are; `id` (text or a whole number, unique; else the line number)
    and `environment` are taken out of it.

    Args:
        path: the file, UTF-8. Blank lines are skipped.
        seed: of the order.
        shuffle: a new order for each epoch, else the file's.
        epochs: how often the file is gone through; None never ends.
        required: payload fields every record must have.
        environment: for records that name none.

    Raises:
        ConfigError: no file, no records, or a record that cannot be used; the message names file, line and field.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        required: tuple[str, ...] = (),
        environment: str = "default",
    ) -> None:
        super().__init__(_read(Path(path), required, environment), seed=seed, shuffle=shuffle, epochs=epochs)


def load_tasks(source: str, arguments: dict[str, Any]) -> Tasks:
    """The task stream a configuration names.

    Args:
        source: path of a `.jsonl` file, or `module:factory` of an object with a method `task(draw)`.
        arguments: for `JsonlTasks` or the factory.

    Raises:
        ConfigError: it cannot be found, or the arguments do not fit.
    """
    if source.endswith(".jsonl"):
        tasks = made("trouper.envs.tasks:JsonlTasks", {"path": source, **arguments})
    else:
        tasks = made(source, arguments)
    if not callable(getattr(tasks, "task", None)):
        raise ConfigError(f"{source!r} gives a {type(tasks).__name__} without a method task(draw)")
    stream: Tasks = tasks
    return stream


def _read(path: Path, required: tuple[str, ...], environment: str) -> list[Task]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tasks cannot be read from {path}: {error}") from error
    tasks: list[Task] = []
    first: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: not JSON: {error}") from error
        task = _task(record, f"{path}, line {number}", str(number), required, environment)
        if first.setdefault(task.id, number) != number:
            raise ConfigError(f"{path}, line {number}: id {task.id!r} was already used in line {first[task.id]}")
        tasks.append(task)
    if not tasks:
        raise ConfigError(f"{path} holds no tasks; give it one JSON object a line")
    return tasks


def _task(record: Any, where: str, default_id: str, required: tuple[str, ...], environment: str) -> Task:
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: a {type(record).__name__}, not a JSON object")
    for field in required:
        if field not in record:
            raise ConfigError(f"{where}: no field {field!r}; there is {', '.join(map(repr, record)) or 'none'}")
    payload = dict(record)
    identity = payload.pop("id", default_id)
    if isinstance(identity, bool) or not isinstance(identity, int | str):
        raise ConfigError(f"{where}: field 'id' is {identity!r}; it must be text or a whole number")
    chosen = payload.pop("environment", environment)
    if not isinstance(chosen, str):
        raise ConfigError(f"{where}: field 'environment' is {chosen!r}; it must be text")
    return Task(str(identity), payload, chosen)
