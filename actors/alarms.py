"""Deadlines that nearly never pass: one task keeps them for all environments.

A cancel scope costs about 5 µs and is paid for every call; an alarm is set once in the time of a limit, however many
calls are made within it. Knows nothing of what it wakes.
"""

import math
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

import trio


class Alarms:
    """Functions to call at a moment; `run` calls them."""

    def __init__(self) -> None:
        self._set: list[tuple[float, int, Callable[[float], None]]] = []
        self._ids = count()  # equal moments ring in the order in which they were set
        self._sleep = trio.CancelScope()

    def set(self, moment: float, ring: Callable[[float], None]) -> None:
        """Have `ring(moment)` called then, by Trio's clock. There is no way to take it back: it may do nothing."""
        heappush(self._set, (moment, next(self._ids), ring))
        if self._set[0][0] == moment:
            self._sleep.cancel()

    async def run(self) -> None:
        """Ring until cancelled."""
        while True:
            with trio.CancelScope() as self._sleep:
                await trio.sleep_until(self._set[0][0] if self._set else math.inf)
            while self._set and self._set[0][0] <= trio.current_time():
                moment, _, ring = heappop(self._set)
                ring(moment)


class Deadline:
    """A deadline for one thing after another.

    Args:
        alarms: wake for it.
        passed: called when it passes; it may set it anew.

    Attributes:
        moment: by Trio's clock; infinity when there is none.
    """

    __slots__ = ("_alarms", "_passed", "_set", "moment")

    def __init__(self, alarms: Alarms, passed: Callable[[], None]) -> None:
        self._alarms = alarms
        self._passed = passed
        # Moments of the alarms that were set, the next one last. They outlive the deadline and serve later ones; one
        # more is set only where it comes before all of them, so that far ones do not pile up behind near ones.
        self._set: list[float] = []
        self.moment = math.inf

    def set(self, moment: float) -> None:
        """It is this one from now on."""
        self.moment = moment
        if not self._set or moment < self._set[-1]:
            self._set.append(moment)
            self._alarms.set(moment, self._look)

    def _look(self, moment: float) -> None:
        self._set.pop()
        if self.moment <= moment:
            self.moment = math.inf  # a farther alarm may be to come
            self._passed()
        elif self.moment < math.inf:
            self.set(self.moment)
