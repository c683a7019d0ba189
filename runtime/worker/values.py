"""What a function's result may be made of, so that it can be carried and shown everywhere."""

import dataclasses
import math
from typing import Any

import msgpack
import numpy as np
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_jsonable_python

from stoker.runtime.arrays import EXT_CODE, BadArray, to_ext, view_of

MAX_DEPTH = 100
SCALARS = (type(None), bool, int, float, str, bytes)
SMALLEST, LARGEST = -(1 << 63), (1 << 64) - 1
PLAIN = frozenset((type(None), bool, float, bytes))
KEYS = (str, bool, int, float)


class BadValue(TypeError):
    """A result that can't be sent; the message says what is wrong with it."""


def plain(value: Any, depth: int = MAX_DEPTH) -> Any:
    """The value in what msgpack carries: numpy arrays as extension types, pydantic models and dataclasses as dicts.

    Raises BadValue for other types, odd keys, deep nesting, huge integers.
    """
    if is_plain(value):
        return value
    if isinstance(value, dict):
        return {key_of(key): plain(part, deeper(depth)) for key, part in value.items()}
    if isinstance(value, msgpack.ExtType) and value.code == EXT_CODE:
        return packed_array(value)
    if isinstance(value, list | tuple):
        return [plain(part, deeper(depth)) for part in value]
    if isinstance(value, BaseModel):
        return from_model(value.model_dump(), depth)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return from_model(value, depth)
    if isinstance(value, np.ndarray):
        return plain_array(value)
    return plain_scalar(value.item() if isinstance(value, np.generic) else value)


def is_plain(value: Any) -> bool:
    """What most results are made of, told fast."""
    kind = type(value)
    if kind is int:
        return SMALLEST <= value <= LARGEST
    return kind in PLAIN or (kind is str and value.isascii())


def from_model(value: Any, depth: int) -> Any:
    """Fields may be whatever pydantic can write as JSON: dates, UUIDs, enums, sets."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, dict):
        return {key_of(key): from_model(part, deeper(depth)) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [from_model(part, deeper(depth)) for part in value]
    if isinstance(value, (*SCALARS, np.ndarray, np.generic)):
        return plain(value, depth)
    try:
        return plain(to_jsonable_python(value), depth)
    except (PydanticSerializationError, ValueError) as error:
        raise BadValue(f"a field of the result is a {type(value).__name__}, which can't be sent") from error


def plain_array(array: np.ndarray) -> Any:
    try:
        return to_ext(array)
    except BadArray as error:
        raise BadValue(f"the result holds an array that can't be sent: {error}") from None


def packed_array(value: msgpack.ExtType) -> msgpack.ExtType:
    try:
        view_of(value.data)
    except BadArray as error:
        raise BadValue(f"the result holds an extension type {EXT_CODE} that is no array: {error}") from None
    return value


def deeper(depth: int) -> int:
    if not depth:
        raise BadValue(f"the result is nested deeper than {MAX_DEPTH} levels")
    return depth - 1


def key_of(key: Any) -> Any:
    if type(key) is str and key.isascii():
        return key
    if not isinstance(key, KEYS):
        raise BadValue(f"a key of the result is a {type(key).__name__}; keys must be text or numbers")
    if isinstance(key, float) and not math.isfinite(key):
        raise BadValue(f"a key of the result is {key}, which JSON can't say; keys must be text or numbers")
    return plain_scalar(key)


def plain_scalar(value: Any) -> Any:
    if not isinstance(value, SCALARS):
        raise BadValue(
            f"a result of type {type(value).__name__} can't be sent; return numbers, text, bytes, lists, dicts, numpy "
            "arrays, pydantic models, dataclasses or None"
        )
    if isinstance(value, int) and not SMALLEST <= value <= LARGEST:
        raise BadValue("the result holds an integer that doesn't fit into 64 bits; return it as text")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadValue("the result holds text with half of a surrogate pair") from error
    return value
