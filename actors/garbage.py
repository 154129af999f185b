"""How often Python looks for garbage in a process that holds many episodes.

Trio's tasks and scopes refer to each other, so thousands of them that wait are thousands of objects that every
collection walks over and finds alive. Knows nothing of a run.
"""

import contextlib
import gc
from collections.abc import Iterator

ALLOCATIONS = 50_000
"""New container objects between two collections; Python's own choice of 700 costs a third of all CPU time at 4,096
episodes, and beyond this nothing more is gained."""


@contextlib.contextmanager
def collecting_rarely() -> Iterator[None]:
    """Inside, collections are rare, and what was there before is never looked at again."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(ALLOCATIONS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
