"""Values on the wire: JSON where it can say them, else msgpack, which has bytes, numpy arrays, NaN and infinities.

Numpy is loaded by who makes an array, or when one comes.
"""

import base64
import binascii
import json
import sys
from types import ModuleType
from typing import Any

import msgpack

from stoker.runtime.client.errors import InvalidInput, StokerError

JSON = "application/json"
MSGPACK = "application/msgpack"
BYTES = "$bytes"
ARRAY = "$array"


def encoded(value: Any) -> tuple[bytes, str]:
    """The body and its media type. Raises InvalidInput for what neither can hold."""
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False).encode(), JSON
    except (TypeError, ValueError):
        return packed(value), MSGPACK


def packed(value: Any) -> bytes:
    try:
        return msgpack.packb(value, default=foreign)  # type: ignore[return-value]
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(
            "an input is None, bool, a number, str, bytes, a numpy array of numbers, or a list or dict of them "
            f"({error}); encode other things as text"
        ) from None


def foreign(value: Any) -> Any:
    """Numpy's own types. Raises TypeError for others."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        from stoker.runtime.arrays import to_ext

        return to_ext(value)
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    raise TypeError(f"Object of type {type(value).__name__} can't be sent")


def unpacked(data: bytes) -> Any:
    """Raises StokerError for an array where there is no numpy."""
    return msgpack.unpackb(data, ext_hook=opened, strict_map_key=False)


def opened(code: int, data: bytes) -> Any:
    return loaded_arrays().opened(code, data)


def loaded_arrays() -> ModuleType:
    try:
        from stoker.runtime import arrays
    except ImportError as error:
        message = f"the result holds a numpy array: install numpy to read it ({error})"
        raise StokerError(406, {"message": message, "code": "numpy_missing"}) from error
    return arrays


def parsed(text: str) -> Any:
    """JSON in which bytes and arrays are marked."""
    return json.loads(text, object_hook=unmarked if '"$' in text else None)


def unmarked(fields: dict[str, Any]) -> Any:
    """{"$bytes": base64} as bytes, {"$array": base64} as the array; other objects, however alike, as they are."""
    try:
        if fields.keys() == {BYTES}:
            return base64.b64decode(fields[BYTES], validate=True)
        if fields.keys() == {ARRAY}:
            return loaded_arrays().from_ext(base64.b64decode(fields[ARRAY], validate=True))
    except (binascii.Error, ValueError, TypeError):
        pass
    return fields
