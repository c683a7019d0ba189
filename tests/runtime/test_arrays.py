"""Arrays in msgpack: what comes back is what went in, and nothing else is let in."""

import contextlib

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.runtime.arrays import EXT_CODE, BadArray, from_ext, opened, to_ext

DTYPES = ["bool", "int8", "uint8", "int16", "uint32", "int64", "float16", "float32", "float64", ">f4", ">i8"]


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4))
def test_an_array_goes_and_comes_back(dtype: str, shape: list[int]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    back = msgpack.unpackb(msgpack.packb(to_ext(array)), ext_hook=opened)
    assert back.dtype == array.dtype.newbyteorder("<") and back.shape == array.shape
    np.testing.assert_array_equal(back, array)
    assert back.flags.writeable


def test_rows_that_are_not_in_a_row() -> None:
    array = np.arange(12).reshape(3, 4)[:, ::2].T
    np.testing.assert_array_equal(from_ext(to_ext(array).data), array)


@pytest.mark.parametrize(
    "array", [np.array([object()]), np.array(["text"]), np.array([1j]), np.zeros(1, "datetime64[s]")]
)
def test_other_things_than_numbers_are_refused(array: np.ndarray) -> None:
    with pytest.raises(BadArray, match="can't be sent"):
        to_ext(array)


@given(st.binary(max_size=40))
def test_any_bytes_are_an_array_or_a_typed_error(data: bytes) -> None:
    with contextlib.suppress(BadArray):
        assert isinstance(from_ext(data), np.ndarray)


@pytest.mark.parametrize(
    "head",
    [
        ["|O8", [1]],
        ["<f4", [-1]],
        ["<f4", [True]],
        ["<f4", [1] * 33],
        ["<f4", [1 << 40]],
        ["<f4", [2]],
        ["<f4"],
        "<f4",
        ["<U1", [1]],
        ["<f16", [1]],
        ["|i4", [1], 0],
    ],
)
def test_a_header_that_promises_something_else_is_refused(head: object) -> None:
    with pytest.raises(BadArray):
        from_ext(msgpack.packb(head) + bytes(4))


def test_other_extension_types_stay_what_they_are() -> None:
    assert opened(EXT_CODE + 1, b"x") == msgpack.ExtType(EXT_CODE + 1, b"x")
