"""The ledger: a redo log of what slots were given and what they yielded, so that a resumed run rolls nothing twice.

A checkpoint says what is trained; the ledger says what was done beyond it: which task each slot drew, and each complete
group, on disk before the trainer sees it. A life reads the whole log (`begin`), uses what is beyond its checkpoint and
appends to a segment of its own. Knows files and records, not pacing: whether a group may still be trained is for its
reader to say.

The log lies in segments `00000001.log`, `00000002.log`, ...; records are MessagePack, arrays in them raw buffers.
"""

import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import starmap
from pathlib import Path
from typing import TypeAlias

import msgspec
from msgspec import Struct

from trouper.actors.segment import Segment, read_segment, sync_folder
from trouper.channels import Episode, Group, RunError, decoder, encode

_SEGMENT_NAME = re.compile(r"(\d+)\.log")


class SlotDraw(Struct, frozen=True, array_like=True):
    """What a slot that is not yet trained had been given.

    Attributes:
        slot: the place in the training order.
        draw: the number of its task; -1 where its group was dropped and it was not given another one yet.
        redraws: how often it had been given another task.
    """

    slot: int
    draw: int
    redraws: int


class Replay(Struct, frozen=True):
    """What the log holds beyond a checkpoint.

    Attributes:
        draws: the newest record of each slot from `first_slot` on.
        used: every draw that any record of any slot names.
        groups: the complete groups of slots from `first_slot` on that were not forgotten, in the order of the log. Of
            several for a slot the newest counts, at the newest's place.
        quarantined: causes by task id.
        damaged: what could not be read, one sentence each with file and byte offset; empty when all was well.
    """

    draws: dict[int, SlotDraw]
    used: frozenset[int]
    groups: tuple[Group, ...]
    quarantined: dict[str, str]
    damaged: tuple[str, ...]


class _Drew(Struct, frozen=True, tag="drew"):
    draw: SlotDraw


class _Completed(Struct, frozen=True, eq=False, tag="completed", omit_defaults=True):
    group: Group
    moved: SlotDraw | None = None


class _Forgot(Struct, frozen=True, tag="forgot"):
    slots: tuple[int, ...]


class _Quarantined(Struct, frozen=True, tag="quarantined"):
    task: str
    cause: str


_Record: TypeAlias = _Drew | _Completed | _Forgot | _Quarantined

_decoder: msgspec.msgpack.Decoder[_Record] = decoder(_Record)


class Ledger:
    """The redo log of one run.

    Records are buffered until `sync`; the methods that buffer never touch the disk and may be called while another
    thread syncs.

    Args:
        folder: where the segments lie; made by the first life.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._life = 0
        self._buffer: list[_Record] = []
        self._buffer_lock = threading.Lock()
        self._disk_lock = threading.Lock()
        self._segment: Segment | None = None
        self._highest_slot = -1  # that the open segment names
        self._write_failed = False
        self._quarantined: dict[str, str] = {}
        self._older: dict[Path, int] = {}  # the highest slot that each closed segment names, oldest segment first

    def begin(self, life: int, first_slot: int) -> Replay:
        """Read the log and open a segment for this life. What an earlier life of this process buffered is kept.

        Args:
            life: the life that begins.
            first_slot: the first slot that the checkpoint does not hold as trained.

        Raises:
            RunError: the log cannot be read or written, or another version of trouper wrote it.
        """
        with self._disk_lock, self._failing("read or written"):
            self._write_buffer()
            self._close_segment()
            reading = _Reading(first_slot)
            self._older = {}
            for path in self._segments():
                reading.expect(path, after=next(reversed(self._older), None))
                self._older[path] = reading.segment(path)
            self._quarantined = reading.quarantined
            self._life = life
            self._open_segment()
        return reading.replay()

    def drew(self, draw: SlotDraw) -> None:
        """A slot was given a task, or lost it."""
        self._append(_Drew(draw))

    def complete(self, group: Group, moved: SlotDraw | None = None) -> None:
        """A slot yielded its group, or became void. The trainer may see it after the next `sync`.

        Task payloads come back as MessagePack gives them, tuples and arrays as lists; one that MessagePack cannot hold
        comes back empty: the draw number makes the task again.

        Args:
            group: what is trained in its slot.
            moved: where the group came from a later slot: that slot, with what had been given to the group's. One
                record tells of both, so that no kill comes in between and leaves a task in two slots.
        """
        self._append(_Completed(group, moved))

    def forget(self, slots: Iterable[int]) -> None:
        """The groups of these slots up to here will never be used: no later `begin` returns them."""
        if forgotten := tuple(slots):
            self._append(_Forgot(forgotten))

    def quarantine(self, task_id: str, cause: str) -> None:
        """A task is not to be tried again in this run."""
        self._append(_Quarantined(task_id, cause))

    def sync(self) -> None:
        """Bring everything buffered to disk; returns at once where nothing is. Blocks: call it in a thread.

        Raises:
            RunError: it could not be written. Nothing of it counts then, and it stays buffered.
        """
        with self._disk_lock, self._failing("written"):
            self._write_buffer()

    def prune(self, first_slot: int) -> None:
        """Delete the oldest segments, as far as all their slots come before `first_slot`. Blocks, and syncs first.

        Only whole segments at the beginning go, so that what is left is always the end of the log: a later record of a
        slot never disappears before an earlier one. Quarantined tasks are carried over.

        Raises:
            RunError: the log cannot be written.
        """
        with self._disk_lock, self._failing("written"):
            self._write_buffer()
            if self._segment is not None and self._highest_slot >= 0:
                self._close_segment()
                self._open_segment()
            for path, highest in list(self._older.items()):
                if highest >= first_slot:
                    break
                path.unlink(missing_ok=True)
                del self._older[path]

    def close(self) -> None:
        """Bring what is buffered to disk, unless that failed just before, and close the segment.

        Raises:
            RunError: it could not be written.
        """
        with self._disk_lock, self._failing("written"):
            if not self._write_failed:
                self._write_buffer()
            self._close_segment()

    def _append(self, record: _Record) -> None:
        with self._buffer_lock:
            self._buffer.append(record)

    def _write_buffer(self) -> None:
        with self._buffer_lock:
            records, self._buffer = self._buffer, []
        if not records:
            return
        try:
            segment = self._segment or self._open_segment()
            segment.append(map(_encoded, records))
        except BaseException:
            with self._buffer_lock:
                self._buffer[:0] = records
            # What the disk holds after a failed write or fsync is uncertain: nothing more goes into this file.
            self._write_failed = True
            self._close_segment()
            raise
        self._write_failed = False
        self._highest_slot = max(self._highest_slot, *map(_highest_slot, records))
        self._quarantined.update((record.task, record.cause) for record in records if isinstance(record, _Quarantined))

    def _open_segment(self) -> Segment:
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True)
            sync_folder(self.folder.parent)
        number = max(map(_number, self._segments()), default=0) + 1
        carried = starmap(_Quarantined, self._quarantined.items())
        self._segment = Segment(self.folder / f"{number:08}.log", self._life, map(_encoded, carried))
        self._highest_slot = -1
        return self._segment

    def _close_segment(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._older[self._segment.path] = self._highest_slot
            self._segment = None

    def _segments(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        named = (path for path in self.folder.iterdir() if _SEGMENT_NAME.fullmatch(path.name))
        return sorted(named, key=lambda path: (_number(path), path.name))

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = error.filename or self.folder
            raise RunError(
                f"the ledger at {where} cannot be {what} ({error.strerror or error}); make room on the disk, or mend "
                "the folder's rights, and go on with --resume"
            ) from error


class _Reading:
    """What has been read of a log so far; holds the groups that survive and no others."""

    def __init__(self, first_slot: int) -> None:
        self._first_slot = first_slot
        self._draws: dict[int, SlotDraw] = {}
        self._used: set[int] = set()
        self._groups: dict[int, Group] = {}
        self._damaged: list[str] = []
        self.quarantined: dict[str, str] = {}

    def expect(self, path: Path, after: Path | None) -> None:
        """Segments go at the beginning only: behind a gap nobody knows which groups it had declared useless."""
        if after is not None and _number(path) > _number(after) + 1:
            self._damaged.append(
                f"{path.parent} has no segment between {after.name} and {path.name}; the {len(self._groups)} complete "
                "groups before the gap are played again"
            )
            self._groups.clear()

    def segment(self, path: Path) -> int:
        """Read one segment, as far as it can be trusted, and return the highest slot it names."""
        highest = -1
        for offset, payload in read_segment(path, self._damaged.append):
            try:
                record = _decoder.decode(payload)
            except msgspec.DecodeError as error:
                self._damaged.append(f"{path} holds a record at byte {offset} that was left out: {error}")
                continue
            highest = max(highest, _highest_slot(record))
            self._take(record)
        return highest

    def replay(self) -> Replay:
        return Replay(
            draws=self._draws,
            used=frozenset(self._used),
            groups=tuple(self._groups.values()),
            quarantined=dict(self.quarantined),
            damaged=tuple(self._damaged),
        )

    def _take(self, record: _Record) -> None:
        match record:
            case _Drew(draw):
                self._used.add(draw.draw)
                if draw.slot >= self._first_slot:
                    self._draws[draw.slot] = draw
            case _Completed(group, moved):
                self._used.add(group.draw)
                if moved is not None:
                    self._move(group, moved)
                if group.slot >= self._first_slot:
                    self._groups.pop(group.slot, None)  # else the older one's place would stay
                    self._groups[group.slot] = group
            case _Forgot(slots):
                for slot in slots:
                    self._groups.pop(slot, None)
            case _Quarantined(task, cause):
                self.quarantined[task] = cause
        self._used.discard(-1)

    def _move(self, group: Group, moved: SlotDraw) -> None:
        self._used.add(moved.draw)
        for given in (SlotDraw(group.slot, group.draw, 0), moved):
            if given.slot >= self._first_slot:
                self._draws[given.slot] = given


def _encoded(record: _Record) -> bytes:
    try:
        return encode(record)
    except (TypeError, OverflowError, RecursionError):
        if not isinstance(record, _Completed):
            raise
        return encode(msgspec.structs.replace(record, group=_without_payloads(record.group)))


def _without_payloads(group: Group) -> Group:
    def stripped(episode: Episode) -> Episode:
        task = msgspec.structs.replace(episode.attempt.task, payload={})
        return msgspec.structs.replace(episode, attempt=msgspec.structs.replace(episode.attempt, task=task))

    return msgspec.structs.replace(group, episodes=tuple(map(stripped, group.episodes)))


def _highest_slot(record: _Record) -> int:
    match record:
        case _Drew(draw):
            return draw.slot
        case _Completed(group, moved):
            return group.slot if moved is None else max(group.slot, moved.slot)
        case _Forgot() | _Quarantined():
            return -1  # the one means nothing once all before it is deleted, the other is carried over


def _number(path: Path) -> int:
    return int(path.stem)
