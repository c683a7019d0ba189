"""Server-sent events as bytes."""

from typing import Any

from pydantic_core import to_json

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
DONE = b"data: [DONE]\n\n"


def event(data: Any, *, name: str = "", id: str = "") -> bytes:
    """One event; `data` becomes one line of JSON. Events without a name are plain messages for any client."""
    head = (f"event: {name}\n" if name else "") + (f"id: {id}\n" if id else "")
    return head.encode() + b"data: " + json_bytes(data) + b"\n\n"


def comment(text: str) -> bytes:
    """A line that clients ignore and proxies count as traffic."""
    return f": {' '.join(text.split())}\n\n".encode()


def json_bytes(value: Any) -> bytes:
    """JSON for anything a job can return: bytes become URL-safe base64, NaN and infinities null."""
    return to_json(value, inf_nan_mode="null", bytes_mode="base64")
