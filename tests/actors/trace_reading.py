"""A trace as its reader sees it, from the packets alone; what does not nest is an error."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

from trouper.actors.perfetto import read_trace


@dataclass
class Span:
    track: str
    name: str
    start: float
    outer: "Span | None"
    flows: list[int]
    annotations: dict[str, Any]
    end: float | None = None

    @property
    def seconds(self) -> float:
        assert self.end is not None
        return self.end - self.start


@dataclass
class Reading:
    """`open` is what had not ended where the file ends."""

    spans: list[Span] = field(default_factory=list)
    counters: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    marks: list[str] = field(default_factory=list)
    open: list[Span] = field(default_factory=list)
    parents: dict[str, str] = field(default_factory=dict)

    def of(self, track: str, name: str = "") -> list[Span]:
        return [span for span in self.spans if span.track == track and name in ("", span.name)]


def read(path: Path) -> Reading:
    """Everything in one file."""
    reading = Reading()
    tracks: dict[int, str] = {}
    names: dict[int, str] = {}
    stacks: dict[str, list[Span]] = defaultdict(list)
    latest: dict[str, int] = {}
    for number, packet in enumerate(read_trace(path)):
        assert (packet.sequence_flags & 1) == (number == 0)  # all that the file refers to is in it
        names |= {name.iid: name.name for name in packet.interned_data.event_names}
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            tracks[track.uuid] = track.name
            if number:
                reading.parents[track.name] = tracks[track.parent_uuid]
            continue
        event, name = packet.track_event, tracks[packet.track_event.track_uuid]
        assert packet.timestamp >= latest.get(name, 0), f"time runs backwards on {name}"
        latest[name] = packet.timestamp
        seconds, stack = packet.timestamp / 1e9, stacks[name]
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            said = {each.name: getattr(each, each.WhichOneof("value")) for each in event.debug_annotations}
            outer = stack[-1] if stack else None
            span = Span(name, names[event.name_iid], seconds, outer, list(event.flow_ids), said)
            stack.append(span)
            reading.spans.append(span)
        elif event.type == TrackEvent.TYPE_SLICE_END:
            assert stack, f"an end on {name} without a begin"
            stack.pop().end = seconds
        elif event.type == TrackEvent.TYPE_COUNTER:
            reading.counters[name].append((seconds, event.double_counter_value))
        else:
            reading.marks.append(names[event.name_iid])
    reading.open = [span for stack in stacks.values() for span in stack]
    return reading
