"""What a run came to, in a few lines: the reward curve, where the wall time went, and the one knob most likely to help.

Pure text from numbers.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from trouper.actors.account import CallTimes, State, sampler_idle, trainer_idle

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


class Usage(Struct, frozen=True, kw_only=True, eq=False):
    """What a run did with its time.

    Attributes:
        states: seconds by what the devices were at; they add up to the wall time.
        slots: episode slots.
        engine_slots: requests that are decoded side by side.
        attempts: seconds of all attempts that ended, and of their parts `generate` and `environment`.
        calls: to environments, tools and reward functions.
    """

    states: Mapping[State, float]
    slots: int
    engine_slots: int
    attempts: CallTimes
    calls: CallTimes

    @property
    def elapsed(self) -> float:
        """Wall time in seconds."""
        return sum(self.states.values())

    def idle(self, device: Callable[[State], str | None]) -> dict[str, float]:
        """A device's idle seconds by cause; `device` is `sampler_idle` or `trainer_idle`."""
        causes: defaultdict[str, float] = defaultdict(float)
        for state, seconds in self.states.items():
            if (cause := device(state)) is not None:
                causes[cause] += seconds
        return causes

    def busy(self, device: Callable[[State], str | None]) -> dict[str, float]:
        """A device's busy seconds by activity."""
        activities: defaultdict[str, float] = defaultdict(float)
        for state, seconds in self.states.items():
            if device(state) is None:
                activities[state.sampler if device is sampler_idle else state.trainer] += seconds
        return activities


BY_LENGTH = LATE, IN_TIME = "grouper/late/", "grouper/in_time/"
"""Beginnings of the names of metrics that count groups by the length of their episodes, as `up_to_64_tokens`."""


def closing(
    curve: Sequence[tuple[int, float]],
    elapsed: float,
    usage: Usage | None = None,
    lengths: Mapping[str, int] | None = None,
) -> str:
    """The closing summary.

    Args:
        curve: (step, mean reward), in order of steps.
        elapsed: wall time of the run, in seconds.
        usage: what it did with it, where somebody took account.
        lengths: groups by the metrics of `BY_LENGTH`, where late ones are dropped.
    """
    steps = f"{len(curve)} step{'' if len(curve) == 1 else 's'}"
    lines = [f"{steps} in {duration(elapsed)}"]
    known = [(step, reward) for step, reward in curve if math.isfinite(reward)]
    if known:
        (first_step, first), (last_step, last) = known[0], known[-1]
        best_step, best = max(known, key=lambda point: point[1])
        lines.append(f"reward   {sparkline([reward for _, reward in curve])}")
        lines.append(
            f"         first {first:.3f} (step {first_step}), last {last:.3f} (step {last_step}), "
            f"best {best:.3f} (step {best_step})"
        )
    if usage is not None and usage.elapsed > 0:
        lines += [*time_table(usage), f"try      {advice(usage)}"]
    if lengths:
        lines.append(f"late     {_dropped(lengths)}")
    return "\n".join(lines)


def _dropped(lengths: Mapping[str, int]) -> str:
    """How many groups were dropped of each length: who drops late ones trains fewer of those that take long."""
    names = {name.removeprefix(LATE).removeprefix(IN_TIME) for name in lengths}
    shares = []
    for name in sorted(names, key=lambda name: int(name.split("_")[2])):
        late, in_time = lengths.get(LATE + name, 0), lengths.get(IN_TIME + name, 0)
        if late + in_time:
            shares.append(f"{late:,} of {late + in_time:,} {name.replace('_', ' ')} an episode")
    late = sum(count for name, count in lengths.items() if name.startswith(LATE))
    return f"{late:,} {'group was' if late == 1 else 'groups were'} dropped: {' · '.join(shares)}"


def time_table(usage: Usage) -> list[str]:
    """Where the wall time went: for each device all of it, busy and idle; the episode slots; the slowest calls."""
    lines = []
    for name, device in (("sampler", sampler_idle), ("trainer", trainer_idle)):
        busy, idle = usage.busy(device), usage.idle(device)
        share = sum(busy.values()) / usage.elapsed
        lines.append(f"{name}  busy {share:4.0%}{_shares(busy, usage.elapsed)}")
        lines.append(f"         idle {1 - share:4.0%}{_shares(idle, usage.elapsed)}")
    attempts = usage.attempts.seconds
    if total := attempts["attempt"]:
        used = total / (usage.slots * usage.elapsed)
        parts = {name: attempts[name] for name in ("environment", "generate")}
        parts["agent and rewards"] = total - sum(parts.values())
        lines.append(f"slots    {usage.slots}, in use {used:.0%}{_shares(parts, total)}")
    slowest = sorted(usage.calls.seconds.items(), key=lambda call: -call[1])[:_SLOWEST]
    if shown := [(name, seconds, usage.calls.calls[name]) for name, seconds in slowest if seconds > 0]:
        calls = " · ".join(f"{name} {duration(seconds)} in {count:,} calls" for name, seconds, count in shown)
        lines.append(f"calls    {calls}")
    return lines


def advice(usage: Usage) -> str:
    """The one knob most likely to help: the one that acts on the largest loss.

    What could be won is read off the idle times. Where each device waits for the other in turn, running them side by
    side would save the smaller wait (`overlap`); what is left of either then says that the other device is too slow.
    """
    sampler, trainer = usage.idle(sampler_idle), usage.idle(trainer_idle)
    training = usage.busy(trainer_idle)
    overlap = min(sampler.get("weights", 0.0), trainer.get("sampling", 0.0))
    losses = {
        _environments: min(sampler.get("environments", 0.0), sum(trainer.values())),
        _overlap: overlap,
        _sampling: trainer.get("sampling", 0.0) - overlap,
        _training: sampler.get("weights", 0.0) - overlap,
        _compile: min(sampler.get("compile", 0.0), training.get("compile", 0.0))
        + min(trainer.get("compile", 0.0), usage.busy(sampler_idle).get("compile", 0.0)),
        _saving: training.get("checkpoint", 0.0),
    }
    remedy = max(losses, key=lambda each: losses[each])
    if losses[remedy] < _NEGLIGIBLE * usage.elapsed:
        return "nothing: no wait is long enough to be worth a knob"
    return f"{remedy(usage)} ({losses[remedy] / usage.elapsed:.0%} of the time)"


_SLOWEST = 3
"""Calls that are named."""
_NEGLIGIBLE = 0.05
"""Share of the wall time below which a loss is left alone."""
_DOMINANT = 0.6
"""Share of all environment time from which one call is the cause, and not their number."""
_FULL = 0.8
"""Share of slots in use from which there is none to spare."""


def _environments(usage: Usage) -> str:
    """Both devices wait for environments: one slow call is named; else more episodes have to be on their way."""
    total = sum(usage.calls.seconds.values())
    name, seconds = max(usage.calls.seconds.items(), key=lambda call: call[1], default=("", 0.0))
    in_use = usage.attempts.seconds["attempt"] / (usage.slots * usage.elapsed)
    knob = "rollout.max_concurrency" if in_use >= _FULL else "rollout.max_staleness"
    if total and seconds / total >= _DOMINANT:
        mean = seconds / usage.calls.calls[name]
        return (
            f"a faster {name}: {seconds / total:.0%} of all environment time, {duration(mean)} a call; "
            f"else a higher {knob}, to have more episodes on their way"
        )
    if in_use >= _FULL:
        return "a higher rollout.max_concurrency: every slot is in use, and both devices wait for environments"
    return "a higher rollout.max_staleness: slots are free, but no episode may begin before the slowest have ended"


def _overlap(usage: Usage) -> str:
    return "a higher rollout.max_staleness: sampler and trainer wait for each other in turn"


def _sampling(usage: Usage) -> str:
    """The trainer waits while the sampler computes: it decodes too few side by side, or has no more slots for them."""
    generating = usage.attempts.seconds["generate"] / usage.elapsed
    if generating >= _FULL * usage.engine_slots:
        return "more engine.slots: the trainer waits for samples, and as many requests run as there are slots"
    return "a higher rollout.max_concurrency: the trainer waits for samples, and engine.slots are not all in use"


def _training(usage: Usage) -> str:
    return "a larger train.micro_batch_size or a larger [mesh]: the sampler waits for a trainer that is always busy"


def _compile(usage: Usage) -> str:
    return "a longer run (train.max_steps): most of it was compiling, which the cache saves the next one"


def _saving(usage: Usage) -> str:
    return "a larger checkpoint.save_interval_steps: the trainer waits for its checkpoints"


def _shares(seconds: Mapping[str, float], whole: float) -> str:
    """`: decode 48% · swap 3%`; what rounds to nothing is left out."""
    parts = sorted(((value / whole, name) for name, value in seconds.items()), reverse=True)
    text = " · ".join(f"{name} {share:.0%}" for share, name in parts if share >= 0.005)
    return f": {text}" if text else ""
