"""Checkpoints: named arrays and a JSON record, committed together. Knows neither models nor runs.

Orbax writes a step into a temporary folder and renames it when arrays and record are there: a step's folder is complete
or does not exist. Arrays are copied off the devices before `save` returns and written in the background; what goes
wrong there is raised by the next call.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import msgspec
import orbax.checkpoint as ocp

from trouper.channels import CheckpointError

_ARRAYS, _META = "arrays", "meta"


class Checkpoints:
    """The checkpoints of one run, by step. One process at a time may write a folder.

    Args:
        folder: where they lie; made if it is missing. What a killed writer left half-written there is removed.
        max_to_keep: older ones beyond this many are deleted once a newer one is complete; None keeps all.

    Raises:
        CheckpointError: the folder cannot be made or read.
    """

    def __init__(self, folder: str | Path, *, max_to_keep: int | None = 3) -> None:
        self.folder = Path(folder).absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=max_to_keep, create=True, cleanup_tmp_directories=True, enable_async_checkpointing=True
        )
        try:
            # Handlers by name: without them a reopened folder's metadata cannot be read before its arrays.
            handlers = {_ARRAYS: ocp.StandardCheckpointHandler(), _META: ocp.JsonCheckpointHandler()}
            self._orbax = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint folder {self.folder} cannot be used ({error}); name a folder that can be written"
            ) from error

    def steps(self) -> list[int]:
        """Complete checkpoints' steps, ascending as numbers."""
        return sorted(self._orbax.all_steps())

    def latest(self) -> int | None:
        """The newest complete checkpoint's step, or None."""
        return max(self.steps(), default=None)

    def save(self, step: int, tree: Any, meta: Any) -> None:
        """Begin a checkpoint. It counts once it is complete, which `wait` waits for.

        Args:
            step: its number, greater than every one before.
            tree: arrays in nested dicts; they may be donated as soon as this returns.
            meta: the JSON record, anything msgspec encodes.

        Raises:
            CheckpointError: an earlier save failed in the background, this one cannot begin, or `step` is not new.
        """
        self._raise_background_failure()
        latest = self.latest()
        if latest is not None and step <= latest:
            raise CheckpointError(
                f"checkpoint step {step} was to be saved in {self.folder}, which already holds step {latest}; resume "
                "from it, or name another folder"
            )
        record = msgspec.to_builtins(meta, str_keys=True)
        with self._failing(f"checkpoint step {step} could not be written to {self.folder}", "check space and rights"):
            self._orbax.save(
                step,
                args=ocp.args.Composite(
                    **{_ARRAYS: ocp.args.StandardSave(tree), _META: ocp.args.JsonSave({"meta": record})}
                ),
            )

    def wait(self) -> None:
        """Wait until every begun checkpoint is complete.

        Raises:
            CheckpointError: one failed.
        """
        with self._failing(f"a checkpoint could not be written to {self.folder}", "check space and rights"):
            self._orbax.wait_until_finished()
        self._raise_background_failure()

    def meta(self, step: int | None = None) -> Any:
        """The JSON record of a step; None means the latest.

        Raises:
            CheckpointError: there is no such step, or it cannot be read.
        """
        step = self._existing(step)
        with self._unreadable(step):
            restored = self._orbax.restore(step, args=ocp.args.Composite(**{_META: ocp.args.JsonRestore()}))
            return restored[_META]["meta"]

    def restore(self, step: int | None, like: Any) -> tuple[Any, Any]:
        """Arrays and JSON record of a step.

        Args:
            step: None means the latest.
            like: the tree to fill, such as `Learner.state_tree()`: arrays or `jax.ShapeDtypeStruct`s; each array comes
                back on its template's devices.

        Raises:
            CheckpointError: there is no such step, its arrays do not fit `like`, or it cannot be read.
        """
        step = self._existing(step)
        template = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        with self._unreadable(step):
            stored = self._orbax.item_metadata(step)[_ARRAYS]
            if stored is None:
                raise FileNotFoundError(f"{self.folder / str(step) / _ARRAYS} is not there")
        self._check_fit(step, _signatures(stored.tree), _signatures(template))
        with self._unreadable(step):
            restored = self._orbax.restore(
                step,
                args=ocp.args.Composite(**{_ARRAYS: ocp.args.StandardRestore(template), _META: ocp.args.JsonRestore()}),
            )
            return restored[_ARRAYS], restored[_META]["meta"]

    def close(self) -> None:
        """Finish what was begun and end the background threads.

        Raises:
            CheckpointError: a save failed.
        """
        with self._failing(f"a checkpoint could not be written to {self.folder}", "check space and rights"):
            self._orbax.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, t: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _existing(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"{self.folder} holds no complete checkpoint; start without resuming")
        if step is None:
            return steps[-1]
        if step not in steps:
            raise CheckpointError(f"{self.folder} holds no complete checkpoint of step {step}; it holds {steps}")
        return step

    def _check_fit(self, step: int, stored: dict[str, str], wanted: dict[str, str]) -> None:
        differences = [f"{name} is missing" for name in sorted(wanted.keys() - stored.keys())]
        differences += [f"{name} is not part of this run" for name in sorted(stored.keys() - wanted.keys())]
        differences += [
            f"{name} is {stored[name]} and should be {wanted[name]}"
            for name in sorted(wanted.keys() & stored.keys())
            if stored[name] != wanted[name]
        ]
        if differences:
            raise CheckpointError(
                f"checkpoint step {step} in {self.folder} does not fit this model and optimizer: {differences[0]}"
                + (f", and {len(differences) - 1} more differences" if len(differences) > 1 else "")
                + "; resume with the configuration that wrote it, or start a new run"
            )

    def _raise_background_failure(self) -> None:
        with self._failing(f"a checkpoint could not be written to {self.folder}", "check space and rights"):
            self._orbax.check_for_errors()

    def _unreadable(self, step: int) -> Any:
        return self._failing(
            f"checkpoint step {step} in {self.folder} cannot be read",
            f"delete {self.folder / str(step)} to resume from the one before it",
        )

    @staticmethod
    @contextmanager
    def _failing(what: str, fix: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # Orbax and TensorStore raise whatever their layers raise: OSError, ValueError, KeyError, XlaRuntimeError.
            raise CheckpointError(f"{what} ({type(error).__name__}: {error}); {fix}") from error


def _signatures(tree: Any) -> dict[str, str]:
    """Dtype and shape of each array by its path."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
