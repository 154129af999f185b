"""The trace of a run: what every actor and device did when, always on, for ui.perfetto.dev.

An actor asks for a track once and opens spans on it; that appends a tuple and no more. A thread of the trace's own
encodes and writes what has come, twice a second: it is no task of the loop, where a ticker would hide every stall. The
trace is never worth a run: what cannot be written is given up, with one line in the log.

Knows no actor, and of the file only that `trouper.actors.perfetto` writes it.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trouper.actors.perfetto import Event, PerfettoFile
from trouper.channels import Attempt

if TYPE_CHECKING:
    from typing import Self

PERIOD = 0.5
"""Real seconds between two writes: a kill loses no more."""

log = logging.getLogger(__name__)


class Track:
    """Where one task's spans go; only that task opens them, so they nest.

    `with track.span("decode"): ...`

    Args:
        name: unique in the trace.
        group: the track that it is shown under, by name.
        counts: it holds numbers.
        put: takes events.
        clock: seconds.
    """

    __slots__ = ("_clock", "_put", "counts", "group", "name")

    def __init__(
        self, name: str, group: str, counts: bool, put: Callable[[Event], None], clock: Callable[[], float]
    ) -> None:
        self.name = name
        self.group = group
        self.counts = counts
        self._put = put
        self._clock = clock

    def begin(self, name: str, flows: Sequence[int] = (), **annotations: Any) -> None:
        """Open a span.

        Args:
            name: one of few; what differs from span to span is an annotation.
            flows: ids that join it to other spans, in the order of time.
            **annotations: shown with it.
        """
        self._put(("begin", self, self._clock(), name, flows, annotations))

    def end(self) -> None:
        """Close the innermost span."""
        self._put(("end", self, self._clock(), "", (), None))

    def span(self, name: str, flows: Sequence[int] = (), **annotations: Any) -> "Self":
        """`begin`; the end of the `with` block ends it."""
        self._put(("begin", self, self._clock(), name, flows, annotations))
        return self

    def now(self) -> float:
        """For `ended`."""
        return self._clock()

    def ended(self, began: float, name: str, flows: Sequence[int] = (), **annotations: Any) -> None:
        """A span that was not opened in time: it began when `now` said so, and ends now; none was opened since."""
        self._put(("begin", self, began, name, flows, annotations))
        self.end()

    def mark(self, name: str) -> None:
        """Something that takes no time."""
        self._put(("mark", self, self._clock(), name, (), None))

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *exc: object) -> None:
        self._put(("end", self, self._clock(), "", (), None))


class Trace:
    """An open trace.

    Args:
        path: where it is written.
        clock: seconds; times in the file count from now.
        file_bytes: see `PerfettoFile`.
    """

    def __init__(self, path: Path, clock: Callable[[], float], **sizes: int) -> None:
        self._started = clock()
        self._clock = clock
        self._tracks: dict[str, Track] = {}
        # Appending and taking are atomic: the loop never waits for the thread that writes.
        self._events: deque[Event] = deque()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(path, sizes), name="trace", daemon=True)
        self._thread.start()

    def track(self, name: str, group: str = "") -> Track:
        """The track of this name.

        Args:
            name: the same name is the same track.
            group: the track that it is shown under, by name.
        """
        return self._track(name, group, counts=False)

    def counter(self, name: str, value: float) -> None:
        """A number that changes over time has this value from now on."""
        track = self._tracks.get(name) or self._track(name, "", counts=True)
        self._events.append(("count", track, self._clock(), "", (), float(value)))

    def close(self) -> None:
        """Write what is left."""
        self._over.set()
        self._thread.join()

    def _track(self, name: str, group: str, *, counts: bool) -> Track:
        if name not in self._tracks:
            self._tracks[name] = Track(name, group, counts, self._events.append, self._clock)
        return self._tracks[name]

    def _work(self, path: Path, sizes: dict[str, int]) -> None:
        try:
            self._write(path, sizes)
        except OSError as error:
            log.warning("%s cannot be written and ends here: %s; the run goes on", path, error)
        finally:
            while not self._over.wait(PERIOD):  # else what is not written would pile up
                self._events.clear()

    def _write(self, path: Path, sizes: dict[str, int]) -> None:
        file = PerfettoFile(path, **sizes)
        try:
            while not self._over.wait(PERIOD):
                file.write(self._taken())
            file.write(self._taken())
        finally:
            file.close()

    def _taken(self) -> Iterator[Event]:
        for _ in range(len(self._events)):  # what comes meanwhile is for the next time
            kind, track, seconds, name, flows, extra = self._events.popleft()
            yield kind, track, seconds - self._started, name, flows, extra


class _NoTrack(Track):
    """Takes spans and forgets them."""

    def __init__(self) -> None:
        super().__init__("", "", False, lambda event: None, lambda: 0.0)

    def begin(self, name: str, flows: Sequence[int] = (), **annotations: Any) -> None:
        pass

    def end(self) -> None:
        pass

    def span(self, name: str, flows: Sequence[int] = (), **annotations: Any) -> "Self":
        return self

    def ended(self, began: float, name: str, flows: Sequence[int] = (), **annotations: Any) -> None:
        pass

    def mark(self, name: str) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass


class _NoTrace(Trace):
    """Takes everything and writes nothing."""

    def __init__(self) -> None:
        pass

    def track(self, name: str, group: str = "") -> Track:
        return NO_TRACK

    def counter(self, name: str, value: float) -> None:
        pass

    def close(self) -> None:
        pass


NO_TRACK: Track = _NoTrack()
"""For parts that nobody traces."""

NO_TRACE: Trace = _NoTrace()
"""For graphs that are not traced."""


def flow_of(attempt: Attempt) -> int:
    """The flow that joins an attempt's turns to the step that trains it."""
    return (attempt.draw << 24 | attempt.member << 8 | attempt.tries) & 0xFFFF_FFFF_FFFF_FFFF
