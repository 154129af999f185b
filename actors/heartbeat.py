"""Notices code that blocks the event loop, and names it with its stack while it does.

A task of the loop calls `beat` every `PERIOD`; a thread that hears nothing for a second too long looks at what the
loop's thread is executing and logs it itself, since the loop cannot. Knows no actors. Code that keeps the interpreter
lock all the while keeps that thread from looking too; it is counted, not named.
"""

import logging
import sys
import sysconfig
import threading
import traceback
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from typing import Self

log = logging.getLogger(__name__)

PERIOD = 0.25
"""Seconds between two beats: so much of a block may go uncounted."""


class Heartbeat:
    """Watches the loop of the thread that enters it, until it is left.

    Under a clock other than the real one there is nothing to compare: then it does nothing.

    Args:
        limit: seconds that the loop may be late before it counts as blocked; it is told again at 10 times as much.

    Attributes:
        incidents: how often the loop was blocked.
        blocked_seconds: for how long, all together.
        real: whether the loop's clock is the real one, so that it has to be beaten every `PERIOD`.
    """

    def __init__(self, limit: float = 1.0) -> None:
        self.incidents = 0
        self.blocked_seconds = 0.0
        self.real = False
        self._limit = limit
        self._last = 0.0
        self._over = threading.Event()
        self._loop_thread = 0

    def __enter__(self) -> "Self":
        clock = trio.lowlevel.current_clock()
        self.real = 0.9 < clock.deadline_to_sleep_time(clock.current_time() + 1.0) <= 1.0
        if self.real:
            self._over.clear()
            self._last = monotonic()
            self._loop_thread = threading.get_ident()
            # A daemon: it never keeps the process alive, whatever becomes of the loop.
            threading.Thread(target=self._listen, name="heartbeat", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()

    def beat(self) -> None:
        """The loop runs."""
        now = monotonic()
        late = now - self._last - PERIOD
        if self.real and late >= self._limit:
            self.incidents += 1
            self.blocked_seconds += late
        self._last = now

    def _listen(self) -> None:
        last, limit = self._last, self._limit
        while not self._over.wait(min(max(0.0, last + PERIOD + limit - monotonic()), PERIOD + self._limit)):
            late = monotonic() - last - PERIOD
            if last != self._last:
                last, limit = self._last, self._limit
            elif late >= limit:
                self._tell(late)
                limit *= 10

    def _tell(self, late: float) -> None:
        frame = sys._current_frames().get(self._loop_thread)
        stack = list(traceback.walk_stack(frame)) if frame is not None else []  # before anything gives the lock away
        if not stack or stack[0][0].f_globals.get("__name__", "").startswith("trio._core._io_"):
            log.warning(
                "the event loop has not run for %.1f s, and not because of its own code: another thread keeps the "
                "interpreter lock, or the machine is short of CPU",
                late,
            )
            return
        frame, line = culprit(stack)
        log.warning(
            "the event loop has been blocked for %.1f s by %s at %s:%d, and every actor waits for it; make the call "
            'async, or run it in a thread (`trio.to_thread.run_sync`; environment.isolation = "thread")\n%s',
            late,
            frame.f_code.co_qualname,
            frame.f_code.co_filename,
            line,
            "".join(traceback.StackSummary.extract(reversed(stack[:20])).format()).rstrip(),
        )


def culprit(stack: list[tuple[FrameType, int]]) -> tuple[FrameType, int]:
    """The innermost frame of the user's own code; else of an installed package, else of all."""
    for ours in (_is_users, _is_packages):
        for frame, line in stack:
            if ours(frame):
                return frame, line
    return stack[0]


def _is_packages(frame: FrameType) -> bool:
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return package not in sys.stdlib_module_names and package not in ("trio", "trouper")


def _is_users(frame: FrameType) -> bool:
    return _is_packages(frame) and not frame.f_code.co_filename.startswith(_INSTALLED)


_INSTALLED = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
