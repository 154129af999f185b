"""Where the wall time of a run goes: what each device does at every moment, and why it does nothing when it does.

Sampler and trainer say what they are at (`DeviceTime.doing`). Whenever one of them changes, the time since the last
change is charged to what both were at together, so the parts add up to the wall time by construction; causes are read
off the pairs. The same changes are the spans of the devices' tracks. Knows names of activities, not who does them.
"""

import resource
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from trouper.actors.trace import NO_TRACE, Trace, Track

if TYPE_CHECKING:
    from typing import Self

Admission = Literal["open", "held", "over"]
"""Whether new episodes may begin: `held` until newer weights are there, `over` when all there are have ended."""

OTHER = ""
"""At nothing that is timed: between two device calls, or not up."""

REQUESTS, DATA, BARRIER, DISK = "wait for requests", "wait for groups", "wait for barrier", "wait for ledger"
"""What a device waits for, as far as its own actor can tell."""

_WAITING = (OTHER, REQUESTS, DATA, BARRIER, DISK)
_STARTING = ("load", "compile")

PULSE = 0.25
"""Least seconds between two looks at the counters."""

SPANS_PER_SECOND = 250
"""Spans of a device that are drawn whatever they are; of more, only those that take `RESOLUTION`."""
RESOLUTION = 0.001
"""Seconds."""


class State(NamedTuple):
    """What the run was at for some time."""

    sampler: str
    trainer: str
    admission: Admission


def sampler_idle(state: State) -> str | None:
    """Why the sampler's device does nothing; None when it computes."""
    if state.sampler not in _WAITING:
        return None
    if state.admission == "over":
        return "draining"
    if state.trainer in _STARTING:
        return "compile"
    if state.sampler == OTHER:
        return "host"
    # Admission that is held while the trainer waits for groups is held by episodes that are still played.
    return "weights" if state.admission == "held" and state.trainer != DATA else "environments"


def trainer_idle(state: State) -> str | None:
    """Why the trainer's device does nothing; None when it computes."""
    if state.trainer not in _WAITING:
        return None
    if state.trainer in (DATA, OTHER) and state.sampler in _STARTING:
        return "compile"
    if state.trainer == DATA:
        return "environments" if state.sampler == REQUESTS else "sampling"
    return {BARRIER: "barrier", DISK: "ledger"}.get(state.trainer, "host")


class DeviceTime:
    """What one device is at.

    Args:
        changed: called after every change, with what the spans of the new activity show.

    Attributes:
        activity: the present one.
    """

    def __init__(self, changed: Callable[[Sequence[int], Mapping[str, Any]], None]) -> None:
        self.activity = OTHER
        self._outer: list[str] = []
        self._changed = changed

    def doing(self, activity: str, flows: Sequence[int] = (), **annotations: Any) -> "Self":
        """For a `with` block: the device is at this inside, and at what it was before after it.

        Args:
            activity: a short name; one of few.
            flows: see `Track.begin`.
            **annotations: likewise.
        """
        self._outer.append(self.activity)
        self.activity = activity
        self._changed(flows, annotations)
        return self

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *exc: object) -> None:
        self.activity = self._outer.pop()
        self._changed((), {})


NOT_TIMED = DeviceTime(lambda flows, annotations: None)
"""For actors whose time nobody accounts for."""


class CallTimes:
    """Seconds and number of calls, by name."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)

    def add(self, name: str, seconds: float) -> None:
        """A call took so long."""
        self.seconds[name] += seconds
        self.calls[name] += 1


class TimeAccount:
    """The account of one run.

    Args:
        clock: seconds since the run began.
        trace: takes the devices' spans.
        admission: how it stands with new episodes now.
        pulse: called every now and then, at a change; for counters.

    Attributes:
        sampler: what the sampler's device is at.
        trainer: what the trainer's device is at.
        seconds: by state, up to the last change or `settle`.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        trace: Trace = NO_TRACE,
        admission: Callable[[], Admission] = lambda: "open",
        pulse: Callable[[], None] = lambda: None,
    ) -> None:
        self.sampler = DeviceTime(self._changed)
        self.trainer = DeviceTime(self._changed)
        self.seconds: defaultdict[State, float] = defaultdict(float)
        self._clock = clock
        self._admission = admission
        self._pulse = pulse
        self._pulsed = self._charged = 0.0
        self._state = State(OTHER, OTHER, "held")
        self._sampler_spans = _Spans(trace.track("sampler device"))
        self._trainer_spans = _Spans(trace.track("trainer device"))
        self._told: dict[State, float] = {}
        self._told_at = 0.0

    def settle(self) -> None:
        """Charge the time up to now."""
        self._changed((), {})

    def metrics(self) -> dict[str, float]:
        """Idle time since the last call, by device and cause."""
        self.settle()
        since = {state: seconds - self._told.get(state, 0.0) for state, seconds in self.seconds.items()}
        span = self._charged - self._told_at
        self._told, self._told_at = dict(self.seconds), self._charged
        if span <= 0:
            return {}
        numbers = {"time/rollout_wait": 0.0, "device/idle_frac": 0.0}
        for state, seconds in since.items():
            causes = {"sampler": sampler_idle(state), "trainer": trainer_idle(state)}
            if None not in causes.values():
                numbers["device/idle_frac"] += seconds / span
            if causes["sampler"] == "weights":
                numbers["time/rollout_wait"] += seconds
            for device, cause in causes.items():
                for name in () if cause is None else (f"device/{device}/idle_frac", f"device/{device}/idle/{cause}"):
                    numbers[name] = numbers.get(name, 0.0) + seconds / span
        return numbers

    def _changed(self, flows: Sequence[int], annotations: Mapping[str, Any]) -> None:
        now = self._clock()
        self.seconds[self._state] += now - self._charged
        self._charged = now
        self._state, sampler, trainer = _seen(self.sampler.activity, self.trainer.activity, self._admission())
        if sampler != self._sampler_spans.label:
            self._sampler_spans.change(now, sampler, flows, annotations)
        if trainer != self._trainer_spans.label:
            self._trainer_spans.change(now, trainer, flows, annotations)
        if now - self._pulsed >= PULSE:
            self._pulsed = now
            self._pulse()


class _Spans:
    """Draws what a device is at, one span after another.

    An engine that is asked for little is called thousands of times a second. When there are that many, a span is drawn
    when it has ended, if it was long enough to be seen.
    """

    def __init__(self, track: Track) -> None:
        self.label = OTHER
        self._track = track
        self._began = 0.0  # by the account's clock
        self._since = 0.0  # by the trace's
        self._second = 0.0
        self._drawn = 0  # spans that began in this second
        self._is_drawn = True
        self._said: tuple[Sequence[int], Mapping[str, Any]] = ((), {})

    def change(self, now: float, label: str, flows: Sequence[int], annotations: Mapping[str, Any]) -> None:
        """The device is at something else."""
        if self.label != OTHER:
            if self._is_drawn:
                self._track.end()
            elif now - self._began >= RESOLUTION:
                self._track.ended(self._since, self.label, self._said[0], **self._said[1])
        if label.startswith("idle: "):  # nobody has said anything about it
            flows, annotations = (), {}
        self.label, self._began, self._said = label, now, (flows, annotations)
        if label != OTHER:
            if now - self._second >= 1.0:
                self._second, self._drawn = now, 0
            self._is_drawn = self._drawn < SPANS_PER_SECOND
            if self._is_drawn:
                self._drawn += 1
                self._track.begin(label, flows, **annotations)
            else:
                self._since = self._track.now()


@lru_cache
def _seen(sampler: str, trainer: str, admission: Admission) -> tuple[State, str, str]:
    """A state, and what the tracks of both devices show in it."""
    state = State(sampler, trainer, admission)
    shown = [
        activity if cause is None else OTHER if cause == "host" else f"idle: {cause}"
        for activity, cause in ((sampler, sampler_idle(state)), (trainer, trainer_idle(state)))
    ]
    return state, shown[0], shown[1]


def resident_mib() -> float:
    """Memory of this process that is resident; its largest so far where the system does not tell the present one."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 2**20
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most / (2**20 if sys.platform == "darwin" else 2**10)
