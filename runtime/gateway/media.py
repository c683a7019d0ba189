"""Answers in the form that the client asked for: JSON, or msgpack with `Accept: application/msgpack`.

What JSON doesn't have stands in it as: bytes as {"$bytes": base64}, arrays as nested lists, NaN and infinities as null,
what can't be read as {"$unreadable": why}.
Events are always JSON; who accepts msgpack too gets their arrays as {"$array": base64 of what `arrays` makes of them}.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import msgpack
from starlette.responses import Response

from stoker.runtime.arrays import EXT_CODE, BadArray, view_of
from stoker.runtime.client.media import ARRAY, BYTES, MSGPACK
from stoker.runtime.gateway.endpoint import Json
from stoker.runtime.gateway.large import LARGE, aside, base64_of, json_by_pieces, list_of
from stoker.runtime.gateway.sse import json_bytes

UNREADABLE = "$unreadable"
SCALARS = (str, int, float, type(None))
# More than functions may return; what writes JSON gives up at twice as many.
MAX_DEPTH = 120


def is_msgpack(headers: Mapping[str, str]) -> bool:
    return headers.get("content-type", "").partition(";")[0].strip() == MSGPACK


def wants_msgpack(headers: Mapping[str, str]) -> bool:
    return MSGPACK in headers.get("accept", "")


class Msgpack(Response):
    """Bytes and arrays as they are; see `arrays`."""

    media_type = MSGPACK

    def render(self, content: Any) -> bytes:
        return msgpack.packb(content)  # type: ignore[return-value]


async def answer_in(headers: Mapping[str, str], content: Any, size: int = 0) -> Response:
    """`size`: of the packed result that `content` shows."""
    return await aside(size, rendered, headers, content, size)


async def value_in(headers: Mapping[str, str], value: Any, size: int) -> Response:
    """A function's own result."""
    return await answer_in(headers, value if wants_msgpack(headers) else await aside(size, shown, value), size)


def rendered(headers: Mapping[str, str], content: Any, size: int) -> Response:
    if wants_msgpack(headers):
        return Msgpack(content)
    return Json(content) if size < LARGE else Response(json_by_pieces(content), media_type=Json.media_type)


def shown_in(headers: Mapping[str, str]) -> Callable[[Any], Any]:
    """How events show values."""
    return marked if wants_msgpack(headers) else shown


def shown(value: Any) -> Any:
    """As JSON can say it."""
    return written(value, lambda array: list_of(view_of(array)))


def marked(value: Any) -> Any:
    """As JSON can say it so that arrays can be told from lists."""
    return written(value, lambda array: {ARRAY: base64_of(array)})


def written(value: Any, show_array: Callable[[bytes], Any], depth: int = MAX_DEPTH) -> Any:
    """Whatever a worker has sent, there is an answer."""
    if isinstance(value, SCALARS):
        return value
    if not depth:
        return {UNREADABLE: f"nested deeper than {MAX_DEPTH} levels"}
    if isinstance(value, dict):
        if clash := clash_of(value):
            return {UNREADABLE: f"several of its keys are {clash} in JSON: make keys text, or read it as msgpack"}
        parts = ((key_of(key), part) for key, part in value.items())
        return {key: written(part, show_array, depth - 1) for key, part in parts}
    if isinstance(value, list):
        return [written(part, show_array, depth - 1) for part in value]
    if isinstance(value, bytes):
        return {BYTES: base64_of(value)}
    if isinstance(value, msgpack.ExtType) and value.code == EXT_CODE:
        return array_of(value.data, show_array)
    return {UNREADABLE: f"a msgpack extension that is no array: {type(value).__name__}"}


def clash_of(value: dict[Any, Any]) -> str:
    """A name in JSON of more than one key, such as of 1 and "1"; "" mostly. Python's json would write both, of which
    readers take the last and lose the other unseen."""
    if all(isinstance(key, str) for key in value):
        return ""
    names = Counter(json_bytes({key_of(key): 0})[1:-3].decode() for key in value)
    return next((name for name, count in names.items() if count > 1), "")


def key_of(key: Any) -> Any:
    return key if isinstance(key, (*SCALARS, bytes)) else UNREADABLE


def array_of(data: bytes, show_array: Callable[[bytes], Any]) -> Any:
    try:
        view_of(data)
        return show_array(data)
    except BadArray as error:
        return {UNREADABLE: str(error)}
