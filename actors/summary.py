"""What a run came to, in a few lines: the reward curve and where the wall time went. Pure text from numbers."""

import math
from collections.abc import Mapping, Sequence

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """One character per value, or per mean of neighbours where there are more than `width`. Gaps where not finite."""
    buckets = min(width, len(values))
    means = []
    for index in range(buckets):
        part = values[index * len(values) // buckets : (index + 1) * len(values) // buckets]
        finite = [value for value in part if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    known = [value for value in means if math.isfinite(value)]
    if not known:
        return ""
    low, high = min(known), max(known)

    def bar(value: float) -> str:
        if not math.isfinite(value):
            return " "
        share = (value - low) / (high - low) if high > low else 0.5
        return _BARS[min(int(share * len(_BARS)), len(_BARS) - 1)]

    return "".join(bar(value) for value in means)


def duration(seconds: float) -> str:
    """`8.2 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def closing(curve: Sequence[tuple[int, float]], seconds: Mapping[str, float], elapsed: float) -> str:
    """The closing summary.

    Args:
        curve: (step, mean reward), in order of steps.
        seconds: time spent by name; names may overlap, since actors work side by side.
        elapsed: wall time of the run, in seconds.
    """
    steps = f"{len(curve)} step{'' if len(curve) == 1 else 's'}"
    lines = [f"{steps} in {duration(elapsed)}"]
    known = [(step, reward) for step, reward in curve if math.isfinite(reward)]
    if known:
        (first_step, first), (last_step, last) = known[0], known[-1]
        best_step, best = max(known, key=lambda point: point[1])
        lines.append(f"reward {sparkline([reward for _, reward in curve])}")
        lines.append(
            f"       first {first:.3f} (step {first_step}), last {last:.3f} (step {last_step}), "
            f"best {best:.3f} (step {best_step})"
        )
    spent = sorted(((value, name) for name, value in seconds.items() if value > 0), reverse=True)
    if spent and elapsed > 0:
        shares = ", ".join(f"{name} {duration(value)} ({value / elapsed:.0%})" for value, name in spent)
        lines.append(f"time   {shares}")
    return "\n".join(lines)
