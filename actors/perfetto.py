"""The trace's file format: Perfetto's protobuf, appended in whole packets, rotated by size.

A file is a sequence of framed packets, so one that was cut anywhere holds everything before the cut, and several are
read together by `cat`. Each file begins with all that its packets refer to: tracks, names, and the spans that were
open. Knows neither actors nor threads.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

FILE_BYTES = 16 << 20
"""A file that has grown to this is closed, and the next one begun."""

FILES = 4
"""Files that are kept: the newest has the trace's own name, older ones are numbered."""

_SEQUENCE = 1
_PROCESS = 1
"""The uuid of the track that all others lie under; theirs follow."""
_BATCH = 4096
"""Events that are encoded before the file's size is looked at again."""

_CLEARED = pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED | pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
_NEEDS = pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
_TYPES = {
    "begin": pb.TrackEvent.TYPE_SLICE_BEGIN,
    "end": pb.TrackEvent.TYPE_SLICE_END,
    "mark": pb.TrackEvent.TYPE_INSTANT,
    "count": pb.TrackEvent.TYPE_COUNTER,
}

Kind = Literal["begin", "end", "mark", "count"]


class Line(Protocol):
    """A track, as the file sees it."""

    name: str
    group: str
    """The track that it is shown under, by name; none when empty."""
    counts: bool
    """Whether it holds numbers instead of spans."""


Event = tuple[Kind, Line, float, str, Sequence[int], dict[str, Any] | float | None]
"""What happened on which track, when (seconds), its name, its flows, and its annotations or its number."""


class PerfettoFile:
    """Appends events to a trace.

    Args:
        path: of the newest file; what an earlier process left there is rotated away, since it may end in half a packet.
        file_bytes: where a file ends.
        files: how many are kept.
    """

    def __init__(self, path: Path, *, file_bytes: int = FILE_BYTES, files: int = FILES) -> None:
        self._path = path
        self._file_bytes = file_bytes
        self._files = files
        self._tracks: dict[str, int] = {}
        self._lines: list[tuple[str, str, bool]] = []
        self._names: dict[str, int] = {}
        # By track, the spans that have begun and not ended: a new file has to begin with them.
        self._open: dict[int, list[Event]] = {}
        self._begin()

    def write(self, events: Iterable[Event]) -> None:
        """Append events; those of one track come in order.

        Raises:
            OSError: the disk is full, or the like.
        """
        batch: list[Event] = []
        for event in events:
            batch.append(event)
            if len(batch) == _BATCH:
                self._append(batch)
                batch = []
        if batch:
            self._append(batch)

    def close(self) -> None:
        """No more comes."""
        self._file.close()

    def _append(self, batch: Sequence[Event]) -> None:
        if self._size >= self._file_bytes:
            self._file.close()
            self._begin()
        trace = pb.Trace()
        for event in batch:
            self._encode(trace, event)
        self._put(trace)

    def _put(self, trace: Any) -> None:
        content = trace.SerializeToString()
        self._file.write(content)  # unbuffered: from here on a kill of the process cannot take it back
        self._size += len(content)

    def _begin(self) -> None:
        for number in range(self._files - 1, 0, -1):
            source = numbered(self._path, number - 1)
            if source.exists():
                source.replace(numbered(self._path, number))
        self._file = self._path.open("wb", buffering=0)
        self._size = 0
        self._names.clear()
        trace = pb.Trace()
        packet = self._packet(trace)
        packet.sequence_flags = _CLEARED
        packet.track_descriptor.uuid = _PROCESS
        packet.track_descriptor.process.pid = os.getpid()
        packet.track_descriptor.process.process_name = "trouper"
        packet.track_descriptor.child_ordering = pb.TrackDescriptor.EXPLICIT
        for uuid, line in enumerate(self._lines, start=_PROCESS + 1):
            self._describe(trace, uuid, *line)
        for event in chain.from_iterable(self._open.values()):
            self._add(trace, event)
        try:
            self._put(trace)
        except OSError:
            self._file.close()
            raise

    def _encode(self, trace: Any, event: Event) -> None:
        kind, track = event[0], event[1]
        uuid = self._uuid(trace, track.name, track.group, track.counts)
        if kind == "begin":
            self._open.setdefault(uuid, []).append(event)
        elif kind == "end":
            if not self._open.get(uuid):
                return  # two tasks have opened spans on it, and what is left of them cannot be told apart
            self._open[uuid].pop()
        self._add(trace, event)

    def _add(self, trace: Any, event: Event) -> None:
        kind, track, seconds, name, flows, extra = event
        packet = self._packet(trace)
        packet.timestamp = max(round(seconds * 1e9), 0)
        this = packet.track_event
        this.type = _TYPES[kind]
        this.track_uuid = self._tracks[track.name]
        if kind == "count":
            this.double_counter_value = extra
        elif kind != "end":
            this.name_iid = self._name(packet, name)
            if flows:
                this.flow_ids.extend(flows)
            if extra:
                assert isinstance(extra, dict)
                for key, value in extra.items():
                    _annotate(this.debug_annotations.add(name=key), value)

    def _uuid(self, trace: Any, name: str, group: str, counts: bool) -> int:
        uuid = self._tracks.get(name)
        if uuid is None:
            if group:
                self._uuid(trace, group, "", False)
            self._lines.append((name, group, counts))
            uuid = self._tracks[name] = _PROCESS + len(self._lines)
            self._describe(trace, uuid, name, group, counts)
        return uuid

    def _describe(self, trace: Any, uuid: int, name: str, group: str, counts: bool) -> None:
        track = self._packet(trace).track_descriptor
        track.uuid, track.name, track.sibling_order_rank = uuid, name, uuid
        track.parent_uuid = self._tracks[group] if group else _PROCESS
        track.child_ordering = pb.TrackDescriptor.EXPLICIT
        if counts:
            track.counter.SetInParent()

    def _name(self, packet: Any, name: str) -> int:
        number = self._names.get(name)
        if number is None:
            number = self._names[name] = len(self._names) + 1
            packet.interned_data.event_names.add(iid=number, name=name)
        return number

    def _packet(self, trace: Any) -> Any:
        return trace.packet.add(trusted_packet_sequence_id=_SEQUENCE, sequence_flags=_NEEDS)


def numbered(path: Path, number: int) -> Path:
    """The name of an older file: `trace.perfetto-trace` becomes `trace.1.perfetto-trace`; the newest is number 0."""
    return path.with_name(f"{path.stem}.{number}{path.suffix}") if number else path


def read_trace(path: Path) -> Iterator[Any]:
    """The packets of one file, up to where it was cut, if it was.

    Args:
        path: of a Perfetto trace.

    Yields:
        `TracePacket` of the `perfetto` package.
    """
    content = path.read_bytes()
    at = 0
    while at < len(content):
        # Field 1 of `Trace`, with its length before it.
        length, start = _varint(content, at + 1)
        if start is None or start + length > len(content):
            return
        yield pb.TracePacket.FromString(content[start : start + length])
        at = start + length


def _varint(content: bytes, at: int) -> tuple[int, int | None]:
    value = shift = 0
    while at < len(content):
        value |= (content[at] & 0x7F) << shift
        shift += 7
        at += 1
        if content[at - 1] < 0x80:
            return value, at
    return value, None


def _annotate(annotation: Any, value: Any) -> None:
    if isinstance(value, int):
        annotation.int_value = value
    elif isinstance(value, float):
        annotation.double_value = value
    else:
        annotation.string_value = str(value)
