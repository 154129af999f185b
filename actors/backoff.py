"""How often and how soon a supervisor restarts: the window and the backoff, as plain bookkeeping.

Knows neither Trio nor supervisors; whoever uses it brings the clock's time.
"""

from collections import deque
from random import Random

from trouper.channels import Exited


class RestartWindow:
    """Counts the restarts of a supervisor's children, all together, within a sliding time.

    Args:
        max_restarts: restarts that are allowed within the window; 0 allows none.
        window: its length in seconds. A restart exactly that long ago no longer counts.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(self, max_restarts: int, window: float) -> None:
        if max_restarts < 0:
            raise ValueError(f"max_restarts = {max_restarts}; it must be 0 or more")
        if not window > 0:
            raise ValueError(f"window = {window} seconds; it must be more than 0")
        self.max_restarts = max_restarts
        self.window = window
        self._exits: deque[Exited] = deque()

    @property
    def history(self) -> tuple[Exited, ...]:
        """The exits inside the window, oldest first."""
        return tuple(self._exits)

    def allows(self, exited: Exited) -> bool:
        """Count a child's end and say whether it may be restarted.

        Args:
            exited: the end; its `at` must not be before that of the one counted last.
        """
        self._exits.append(exited)
        while self._exits[0].at <= exited.at - self.window:
            self._exits.popleft()
        return len(self._exits) <= self.max_restarts


class Backoff:
    """Exponential delays between the lives of one child, with jitter so that siblings do not come back in step.

    The n-th delay in a row is uniform between half of and all of `min(longest, first * factor ** n)`.

    Args:
        seed: the same seed gives the same delays.
        first: seconds before the first restart, at most.
        factor: growth from one delay to the next.
        longest: no delay is longer, in seconds.
        healthy: a child that was up for this many seconds starts over with `first`.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self, seed: str, first: float = 0.1, factor: float = 2.0, longest: float = 30.0, healthy: float = 60.0
    ) -> None:
        if not 0 <= first <= longest:
            raise ValueError(f"first = {first} and longest = {longest} seconds; need 0 <= first <= longest")
        if factor < 1:
            raise ValueError(f"factor = {factor}; it must be 1 or more, or the delays would shrink")
        self._seed = seed
        self._delays = 0
        self._first = first
        self._factor = factor
        self._longest = longest
        self._healthy = healthy
        self._ceiling = first

    def delay(self, uptime: float) -> float:
        """Seconds to wait before the next life.

        Args:
            uptime: seconds that the last life was up, from `started()` to its end; 0 if it never came up.
        """
        if uptime >= self._healthy:
            self._ceiling = self._first
        ceiling = self._ceiling
        self._ceiling = min(self._longest, ceiling * self._factor)
        self._delays += 1
        # Made when it is needed: a generator takes 3 kB, and most children of most runs never fail.
        return ceiling * Random(f"{self._seed}/{self._delays}").uniform(0.5, 1.0)
