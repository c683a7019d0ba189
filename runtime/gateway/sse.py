"""Server-sent events as bytes."""

from collections.abc import Callable
from typing import Any

from pydantic_core import to_json

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
PLACE = "<text>"
DONE = b"data: [DONE]\n\n"


def event(data: Any, *, name: str = "", id: str = "") -> bytes:
    """One event; `data` becomes one line of JSON. Events without a name are plain messages for any client."""
    return framed(json_bytes(data), name=name, id=id)


def framed(line: bytes, *, name: str = "", id: str = "") -> bytes:
    head = (f"event: {name}\n" if name else "") + (f"id: {id}\n" if id else "")
    return head.encode() + b"data: " + line + b"\n\n"


class TextEvent:
    """Events whose JSON differs in one string only: the rest, made by `around(text)`, is rendered once.

    Nothing behind that string may depend on a client.
    """

    def __init__(self, around: Callable[[str], Any]) -> None:
        self._before, _, self._after = json_bytes(around(PLACE)).rpartition(json_bytes(PLACE))

    def fill(self, text: str, id: str) -> bytes:
        head = f"id: {id}\n".encode() if id else b""
        return b"".join((head, b"data: ", self._before, json_bytes(text), self._after, b"\n\n"))


def comment(text: str) -> bytes:
    """A line that clients ignore and proxies count as traffic."""
    return f": {' '.join(text.split())}\n\n".encode()


def json_bytes(value: Any) -> bytes:
    """JSON for anything a job can return: bytes become URL-safe base64, NaN and infinities null."""
    return to_json(value, inf_nan_mode="null", bytes_mode="base64")
