"""Checkpoints: named arrays and a JSON record, committed together. Knows neither models nor runs.

Orbax writes a step into a temporary folder and renames it when arrays and record are there: a step's folder is complete
or does not exist. Arrays are copied off the devices before `save` returns and written in the background; what goes
wrong there is raised by the next call.

What can still go wrong with a complete folder is that files are cut short or lost later, by a disk or by a copy. So
each folder lists its files' sizes, and a newest checkpoint that turns out damaged is set aside for the one before it.
"""

import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import msgspec
import orbax.checkpoint as ocp

from trouper.channels import CheckpointError

_ARRAYS, _META = "arrays", "meta"
_SIZES = "sizes.json"
_SCORE = "score.json"
_UNFINISHED = "*.orbax-checkpoint-tmp*"
_log = logging.getLogger(__name__)


class _Damaged(CheckpointError):
    """Something in a step's folder is not as it was written.

    Attributes:
        what: the step and what is wrong with it.
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; name an older step, or none for the newest that can be read")
        self.what = what


class Checkpoints:
    """The checkpoints of one run, by step.

    One process at a time may write a folder. Reading changes nothing in it, but for damaged newest steps that `restore`
    sets aside.

    Args:
        folder: where they lie; made if it is missing. What killed writers left half-written is removed by the next
            `save`.
        max_to_keep: how many of the newest stay, at least 1; older ones are deleted once a newer one is complete. None
            keeps all.
        keep_best: how many with the highest scores stay besides.
        note: is told in a sentence when a damaged step was set aside.

    Raises:
        CheckpointError: the folder cannot be made or read.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        max_to_keep: int | None = 3,
        keep_best: int = 0,
        note: Callable[[str], None] = _log.warning,
    ) -> None:
        self.folder = Path(folder).absolute()
        self._max_to_keep = max_to_keep
        self._keep_best = keep_best
        self.note = note
        self._begun: int | None = None  # the step that is being written
        self._scores: dict[int, float | None] = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.steps()
        except OSError as error:
            raise CheckpointError(
                f"checkpoint folder {self.folder} cannot be used ({error}); name a folder that can be written"
            ) from error
        # Handlers by name: without them a reopened folder's metadata cannot be read before its arrays.
        handlers = {_ARRAYS: ocp.StandardCheckpointHandler(), _META: ocp.JsonCheckpointHandler()}
        self._orbax = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(**handlers),
            # It comes after the last file was written and before the rename.
            async_options=ocp.AsyncOptions(post_finalization_callback=self._write_sizes),
        )

    def steps(self) -> list[int]:
        """Complete checkpoints' steps, ascending as numbers. One that is still being written does not count."""
        return sorted(
            int(path.name)
            for path in self.folder.iterdir()
            if path.name.isdecimal() and path.name == str(int(path.name)) and path.is_dir() and any(path.iterdir())
        )

    def latest(self) -> int | None:
        """The newest complete checkpoint's step, or None. One that is still being written does not count."""
        return max(self.steps(), default=None)

    committed = latest  # what a writer calls it: for it the newest step may be one that it has only begun

    def save(self, step: int, tree: Any, meta: Any, score: float | None = None) -> None:
        """Begin a checkpoint. It counts once it is complete, which `wait` waits for.

        Args:
            step: its number, greater than every one before.
            tree: arrays in nested dicts; they may be donated as soon as this returns.
            meta: the JSON record, anything msgspec encodes.
            score: what `keep_best` compares, higher is better. None, NaN and infinities are never best.

        Raises:
            CheckpointError: an earlier save failed in the background, this one cannot begin, or `step` is not new.
        """
        latest = self.latest() if self._begun is None else self._begun
        if latest is not None and step <= latest:
            raise CheckpointError(
                f"checkpoint step {step} was to be saved in {self.folder}, which already holds step {latest}; resume "
                "from it, or name another folder"
            )
        self.wait()
        record = msgspec.to_builtins(meta, str_keys=True)
        score = score if score is not None and math.isfinite(score) else None
        with self._failing(f"checkpoint step {step} could not be written to {self.folder}", "check space and rights"):
            self._clear_way(step)
            self._orbax.save(
                self.folder / str(step),
                args=ocp.args.Composite(
                    **{_ARRAYS: ocp.args.StandardSave(tree), _META: ocp.args.JsonSave({"meta": record, "score": score})}
                ),
            )
            self._begun = step

    def rate(self, step: int, score: float) -> None:
        """Give a complete checkpoint its score afterwards; a step that is not there any more is ignored."""
        if step not in self.steps():
            return
        with self._failing(
            f"the score of checkpoint step {step} could not be written to {self.folder}", "check space and rights"
        ):
            half = self.folder / str(step) / f"{_SCORE}.part"
            half.write_text(json.dumps(score if math.isfinite(score) else None), encoding="utf-8")
            half.replace(half.with_suffix(""))
        self._scores.pop(step, None)

    def wait(self) -> None:
        """Wait until every begun checkpoint is complete, and delete those that are not to be kept.

        Raises:
            CheckpointError: one failed.
        """
        begun, self._begun = self._begun, None
        which = "a checkpoint" if begun is None else f"checkpoint step {begun}"
        with self._failing(f"{which} could not be written to {self.folder}", "check space and rights"):
            self._orbax.wait_until_finished()
        if begun is not None:
            with self._failing(f"old checkpoints in {self.folder} could not be deleted", "check rights"):
                self._delete_old()

    def meta(self, step: int | None = None) -> Any:
        """The JSON record of a step; None means the latest.

        Raises:
            CheckpointError: there is no such step, or it cannot be read.
        """
        return self._record(self._existing(step))["meta"]

    def restore(self, step: int | None, like: Any) -> tuple[Any, Any]:
        """Arrays and JSON record of a step.

        Args:
            step: None means the newest that can be read. Damaged ones that are newer are renamed to `<step>.damaged`
                and noted; what does not fit `like` is an error and never passed over.
            like: the tree to fill, such as `Learner.state_tree()`: arrays or `jax.ShapeDtypeStruct`s; each array comes
                back on its template's devices.

        Raises:
            CheckpointError: there is no such step, its arrays do not fit `like`, or it cannot be read.
        """
        try:
            self.wait()
        except CheckpointError as error:  # what was not written cannot be read; what was can
            self.note(str(error))
        if step is not None:
            return self._read(self._existing(step), like)
        self._existing(None)
        damaged: list[tuple[int, _Damaged]] = []
        for each in reversed(self.steps()):
            try:
                found = self._read(each, like)
            except _Damaged as error:
                damaged.append((each, error))
                continue
            for bad, why in damaged:
                with self._failing(f"{why.what}, and it could not be set aside", "check rights"):
                    aside = self._set_aside(bad)
                self.note(f"{why.what}; it is now {aside.name}, and step {each} is used instead")
            return found
        raise CheckpointError(
            f"{self.folder} holds no checkpoint that can be read:\n"
            + "\n".join(f"  {why.what}" for _, why in damaged)
            + "\nbring one back from a copy, or start a new run"
        ) from damaged[0][1]

    def close(self) -> None:
        """Finish what was begun and end the background threads.

        Raises:
            CheckpointError: a save failed.
        """
        try:
            self.wait()
        finally:
            with self._failing(f"checkpoints in {self.folder} could not be closed", "check space and rights"):
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

    def _read(self, step: int, like: Any) -> tuple[Any, Any]:
        template = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        with self._reading(step):
            self._check_sizes(step)
            stored = self._orbax.metadata(self.folder / str(step)).item_metadata[_ARRAYS]
            if stored is None:
                raise FileNotFoundError(f"{self.folder / str(step) / _ARRAYS} is not there")
        self._check_fit(step, _signatures(stored.tree), _signatures(template))
        record = self._record(step)
        with self._reading(step):
            restored = self._orbax.restore(
                self.folder / str(step),
                args=ocp.args.Composite(**{_ARRAYS: ocp.args.StandardRestore(template)}),
            )
            return restored[_ARRAYS], record["meta"]

    def _record(self, step: int) -> Any:
        with self._reading(step):
            restored = self._orbax.restore(
                self.folder / str(step), args=ocp.args.Composite(**{_META: ocp.args.JsonRestore()})
            )
            return restored[_META]

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

    def _write_sizes(self) -> None:
        (unfinished,) = self.folder.glob(_UNFINISHED)
        files = sorted(path for path in unfinished.rglob("*") if path.is_file() and path.parent != unfinished)
        sizes = {str(path.relative_to(unfinished)): path.stat().st_size for path in files}
        (unfinished / _SIZES).write_text(json.dumps(sizes), encoding="utf-8")

    def _check_sizes(self, step: int) -> None:
        folder = self.folder / str(step)
        if not (folder / _SIZES).exists():
            return  # written before sizes were listed, or lost: the arrays' own checks have to do
        for name, size in json.loads((folder / _SIZES).read_text(encoding="utf-8")).items():
            found = (folder / name).stat().st_size
            if found != size:
                raise ValueError(f"{name} has {found} bytes and was written with {size}")

    def _delete_old(self) -> None:
        if self._max_to_keep is None:
            return
        steps = self.steps()
        scored = [(score, step) for step in steps if (score := self._score(step)) is not None]
        best = sorted(scored, reverse=True)[: self._keep_best]
        for step in set(steps) - set(steps[-self._max_to_keep :]) - {step for _, step in best}:
            # Renamed first: half a folder must never look like a checkpoint.
            shutil.rmtree((self.folder / str(step)).rename(self.folder / f"{step}.deleted"))

    def _score(self, step: int) -> float | None:
        if step not in self._scores:
            try:
                later = self.folder / str(step) / _SCORE
                given = json.loads(later.read_text(encoding="utf-8")) if later.exists() else None
                self._scores[step] = self._record(step).get("score") if given is None else given
            except _Damaged:
                return None
        return self._scores[step]

    def _clear_way(self, step: int) -> None:
        """Remove what killed or failed writers left, and whatever else has the step's name."""
        for pattern in (_UNFINISHED, "[0-9]*.deleted"):
            for left in self.folder.glob(pattern):
                shutil.rmtree(left)
        if (self.folder / str(step)).exists():
            self._set_aside(step)
        self._scores.pop(step, None)

    def _set_aside(self, step: int) -> Path:
        aside = self.folder / f"{step}.damaged"
        if aside.is_dir():
            shutil.rmtree(aside)
        else:
            aside.unlink(missing_ok=True)
        return (self.folder / str(step)).rename(aside)

    @contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            what = f"checkpoint step {step} in {self.folder} cannot be read ({type(error).__name__}: {error})"
            # Orbax raises a plain Exception for an array it cannot read, TensorStore a ValueError for everything.
            broken = type(error) is Exception or isinstance(error, ValueError | LookupError | FileNotFoundError)
            if broken and not any(lack in str(error) for lack in ("RESOURCE_EXHAUSTED", "PERMISSION_DENIED")):
                raise _Damaged(what) from error
            raise CheckpointError(f"{what}; see that memory, open files and rights suffice for it") from error

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
