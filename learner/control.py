"""What the host tells the device: the control matrix of a decode chunk, prefill rows, prefix copies.

Small integer arrays of fixed shapes; whatever a request asks for is data in them, so no request compiles anything.
"""

import struct

import msgspec
import numpy as np
from numpy.typing import NDArray

from trouper.learner.request import MAX_STOPS, Request


class Column:
    """Columns of the control matrix, the one small array that goes to the device with every chunk."""

    TOKEN = 0
    POSITION = 1
    LEFT = 2
    SEED = 3
    TEMPERATURE = 4
    TOP_P = 5
    TOP_K = 6
    STOPS = 7


CONTROL_WIDTH = Column.STOPS + MAX_STOPS
_ROW = struct.Struct(f"=iiiIffi{MAX_STOPS}i")


def control_row(request: Request, length: int) -> NDArray[np.int32]:
    """The control matrix's row for a request that does not decode yet: its position is `length`, beyond the cache.

    Packed in one go instead of one NumPy call a column: with short turns that is a good part of the host's time.
    """
    sampling, stops = request.sampling, request.stop + (-1,) * (MAX_STOPS - len(request.stop))
    packed = _ROW.pack(
        0, length, request.max_tokens, request.seed, sampling.temperature, sampling.top_p, sampling.top_k, *stops
    )
    return np.frombuffer(packed, np.int32)


class Copy(msgspec.Struct, frozen=True):
    """The first `length` cached tokens of slot `source` are to be copied to slot `target`."""

    source: int
    target: int
    length: int


class Fill(msgspec.Struct, frozen=True, eq=False):
    """One fixed-shape prefill call of `R` rows by `T` tokens; a slot may own several rows.

    Attributes:
        slots: int32 [R].
        tokens: int32 [R, T].
        positions: int32 [R, T]; the cache length where there is nothing to write.
        count: how many tokens are written.
        reach: one more than the highest position written.
    """

    slots: NDArray[np.int32]
    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    count: int
    reach: int


def allot(needed: NDArray[np.int32], rows: int) -> NDArray[np.int32]:
    """How many of a prefill call's rows each slot gets: one each, then what is left, in their order.

    Args:
        needed: int32 [n], at least 1 each.
        rows: of the call.
    """
    given = np.minimum(needed, 1)
    given[rows:] = 0
    extra = needed - given
    if len(needed) < rows:
        given += np.clip(rows - len(needed) - (np.cumsum(extra) - extra), 0, extra)
    return given
