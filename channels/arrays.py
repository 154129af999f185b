"""Messages as bytes: numpy arrays become (dtype, shape, raw buffer) at process and disk edges.

Knows msgspec and numpy, not what the messages mean. Inside a process nothing is encoded.
"""

from typing import Any, TypeVar, get_origin

import msgspec
import numpy as np

T = TypeVar("T")


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        # Kind V holds records and foreign types such as bfloat16, whose dtype string does not lead back to them.
        if value.dtype.hasobject or value.dtype.kind == "V":
            raise TypeError(f"an array of dtype {value.dtype} has no portable raw buffer; convert it to numbers first")
        return (
            value.dtype.str,
            value.shape,
            np.ascontiguousarray(value).reshape(-1).view(np.uint8).data if value.size else b"",
        )
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot encode {type(value).__name__}; messages hold structs, plain values and numpy arrays")


def _decode_array(expected: type, value: Any) -> Any:
    if get_origin(expected) is np.ndarray or expected is np.ndarray:
        dtype, shape, buffer = value
        return np.frombuffer(buffer, dtype=np.dtype(dtype)).reshape(shape)
    raise TypeError(f"cannot decode a {expected}; messages hold structs, plain values and numpy arrays")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def encode(message: Any) -> bytes:
    """MessagePack bytes of a message; arrays are copied once, as raw buffers."""
    return _encoder.encode(message)


def decoder(message_type: type[T] | Any) -> "msgspec.msgpack.Decoder[T]":
    """A reusable decoder for one message type; decoded arrays are read-only."""
    return msgspec.msgpack.Decoder(message_type, dec_hook=_decode_array)
