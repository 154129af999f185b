"""What the package logs at WARNING and above, and every Python warning, as lines of the run's log.

Knows no actor. Device threads and the heartbeat's thread log too; files and screen belong to the event loop.
"""

import logging
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from typing import Self

LOGGERS = ("trouper", "py.warnings")


class LogLines(logging.Handler):
    """While it is entered, inside a Trio loop, what is logged becomes a line.

    Args:
        note: takes a line that is to be shown, in the loop's thread.
        keep: takes one that was shown already: what another thread says about a blocked loop cannot wait for the loop.
    """

    def __init__(self, note: Callable[[str], None], keep: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note
        self._keep = keep
        self._thread = threading.get_ident()
        self._token = trio.lowlevel.current_trio_token()
        self._captures = self._over = False

    def __enter__(self) -> "Self":
        before = warnings.showwarning
        logging.captureWarnings(True)
        self._captures = warnings.showwarning is not before  # else somebody else does, and goes on after this
        for name in LOGGERS:
            logging.getLogger(name).addHandler(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self._over = True
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(self)
        if self._captures:
            logging.captureWarnings(False)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        try:
            text = self.format(record).rstrip()
        except Exception:  # arguments that do not fit the message
            self.handleError(record)
            return
        if threading.get_ident() == self._thread:
            self._write(self._note, text)
            return
        if logging.lastResort is not None:
            logging.lastResort.handle(record)
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._write, self._keep, text)

    def _write(self, how: Callable[[str], None], text: str) -> None:
        if self._over:
            return
        try:
            how(text)
        except Exception:  # a full disk ends the run where it records a step, not in the middle of whoever warns
            self.handleError(logging.makeLogRecord({"msg": text}))
