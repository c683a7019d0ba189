"""Numpy arrays in msgpack: extension type 78, whose data is a msgpack pair [dtype, shape], then the bytes, row by row.

`dtype` is numpy's short name of a fixed-size number, with its byte order: "<f4", "|u1", "|b1". Nothing else is let in.
"""

import math
import re
from typing import Any

import msgpack
import numpy as np

EXT_CODE = 78
DTYPE = re.compile(r"\|b1|[|<>][iu]1|[<>](?:[iu][248]|f[248])")
MAX_DIMENSIONS = 32


class BadArray(ValueError):
    """The bytes are not an array, or the array can't be carried; the message says why."""


def to_ext(array: np.ndarray) -> msgpack.ExtType:
    """Raises BadArray for an array of other things than integers, floats and bools."""
    dtype = array.dtype.newbyteorder("<").str
    if not DTYPE.fullmatch(dtype):
        raise BadArray(f"an array of {array.dtype} can't be sent; make it one of integers, floats or bools")
    head: bytes = msgpack.packb([dtype, list(array.shape)])  # type: ignore[assignment]
    return msgpack.ExtType(EXT_CODE, head + array.astype(dtype, copy=False).tobytes())


def from_ext(data: bytes) -> np.ndarray:
    """A writable array. Raises BadArray."""
    return view_of(data).copy()


def view_of(data: bytes) -> np.ndarray:
    """The array that the bytes are, without a copy. Raises BadArray."""
    dtype, shape, start = head_of(data)
    try:
        return np.frombuffer(data, dtype, offset=start).reshape(shape)
    except ValueError as error:
        raise BadArray(f"numpy can't make an array of {dtype} and shape {shape}: {error}") from error


def head_of(data: bytes) -> tuple[str, list[int], int]:
    """Type, shape, and where the numbers begin, once their length is known to be right. Raises BadArray."""
    unpacker = msgpack.Unpacker(max_buffer_size=max(1, len(data)))
    unpacker.feed(data)
    try:
        head = unpacker.unpack()
    except Exception as error:
        raise BadArray("an array's data begins with [dtype, shape]") from error
    if not (isinstance(head, list) and len(head) == 2 and isinstance(head[0], str) and is_shape(head[1])):
        raise BadArray("an array's data begins with [dtype, shape]")
    dtype, shape = head
    if not DTYPE.fullmatch(dtype):
        raise BadArray(f"an array's dtype is of integers, floats or bools, with its byte order, not {dtype[:20]!r}")
    start, size = unpacker.tell(), math.prod(shape) * int(dtype[2:])
    if len(data) - start != size:
        raise BadArray(f"an array of {dtype} and shape {shape} has {size} bytes, not {len(data) - start}")
    return dtype, shape, start


def is_shape(value: Any) -> bool:
    """Of arrays that numpy can make, empty ones included."""
    whole = isinstance(value, list) and len(value) <= MAX_DIMENSIONS
    return whole and all(isinstance(side, int) and not isinstance(side, bool) and 0 <= side < 1 << 32 for side in value)


def opened(code: int, data: bytes) -> Any:
    """As `ext_hook` of a reader that works with the arrays."""
    return from_ext(data) if code == EXT_CODE else msgpack.ExtType(code, data)
