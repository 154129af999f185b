from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from msgspec import Struct
from numpy.typing import NDArray

from trouper.channels import decoder, encode


class Box(Struct, frozen=True, eq=False):
    array: NDArray[Any]


round_trip = decoder(Box)

dtypes = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="="),
    hnp.integer_dtypes(endianness=">"),
    hnp.floating_dtypes(sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(sizes=(64, 128)),
    hnp.datetime64_dtypes(),
    hnp.unicode_string_dtypes(),
)
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


@settings(deadline=None)
@given(hnp.arrays(dtype=dtypes, shape=shapes))
def test_every_array_comes_back_bit_for_bit(array: NDArray[Any]) -> None:
    back = round_trip.decode(encode(Box(array))).array
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


@pytest.mark.parametrize("array", [np.arange(12).reshape(3, 4).T, np.arange(12)[::-3], np.broadcast_to(1.5, (2, 3))])
def test_strides_do_not_matter(array: NDArray[Any]) -> None:
    np.testing.assert_array_equal(round_trip.decode(encode(Box(array))).array, array)


def test_numbers_keep_nan_and_infinity() -> None:
    array = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)
    assert round_trip.decode(encode(Box(array))).array.tobytes() == array.tobytes()


def test_decoded_arrays_are_read_only() -> None:
    assert not round_trip.decode(encode(Box(np.arange(3)))).array.flags.writeable


def test_numpy_scalars_travel_as_plain_values() -> None:
    assert decoder(list[Any]).decode(encode([np.float32(0.5), np.int64(3), np.bool_(True)])) == [0.5, 3, True]


@pytest.mark.parametrize(
    "array",
    [np.array([None]), np.zeros(2, ml_dtypes.bfloat16), np.zeros(2, [("a", np.int32)])],
    ids=["objects", "bfloat16", "records"],
)
def test_arrays_that_would_not_come_back_are_refused(array: NDArray[Any]) -> None:
    with pytest.raises(TypeError, match="no portable raw buffer; convert it to numbers first"):
        encode(Box(array))


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot encode object; messages hold"):
        encode(object())
    with pytest.raises(msgspec.ValidationError, match="cannot decode"):
        decoder(complex).decode(encode([1.0, 2.0]))
