"""Arrays of the contract between processes and ranks, and how `msgspec` carries them."""

from __future__ import annotations

from typing import Any

import numpy as np

Int32 = np.ndarray[Any, np.dtype[np.int32]]
Int16 = np.ndarray[Any, np.dtype[np.int16]]
Float32 = np.ndarray[Any, np.dtype[np.float32]]


def encode_array(value: object) -> object:
    """`msgspec` hook: an array travels as (dtype, shape, bytes)."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).reshape(-1).data.cast("B")
    if isinstance(value, np.integer):
        return int(value)
    raise TypeError(f"cannot encode {type(value).__name__}")


_WIRE_DTYPES = frozenset({"<i4", "<i2", "<f4"})


def decode_array(kind: object, value: Any) -> Any:
    """`msgspec` hook: the inverse of `encode_array`; only int32, int16 and float32 are accepted."""
    dtype, shape, data = value
    if dtype not in _WIRE_DTYPES:
        raise ValueError(f"dtype {dtype!r} is not accepted on the wire")
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def int32(values: object) -> Int32:
    return np.asarray(values, dtype=np.int32)
