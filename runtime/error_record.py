"""Error records: maps with `type`, `message`, `code`, `param` and `traceback`, in which no text is longer than its
limit, whoever wrote it."""

from collections.abc import Mapping
from typing import Any

from stoker.queue.records import pack

MOST_MESSAGE, MOST_TRACEBACK, MOST_NAME = 4_096, 16_384, 256
"""In characters, the note of what was cut among them."""
NOTE = 64
TEXTS = ("type", "message", "code", "param", "traceback")
MOST_KEYS = 16
MOST_FACTS = 16_384


def bounded(error: Any) -> dict[str, Any]:
    """The record, cut to size; what is none, or says nothing, becomes one that says so. Again, it changes nothing."""
    if not isinstance(error, Mapping):
        error = {"message": f"a {type(error).__name__} stands where the error should be"}
    keys = [key for key in error if isinstance(key, str) and len(key) <= MOST_NAME]
    parts = {key: part(key, error[key]) for key in keys[:MOST_KEYS]}
    return {**parts, "message": parts.get("message") or "no reason was given"}


def part(key: str, value: Any) -> Any:
    if isinstance(value, str):
        return cut_traceback(value) if key == "traceback" else cut(key, value)
    if key == "facts":
        return value if len(pack(value)) <= MOST_FACTS else {}
    return value if isinstance(value, bool | int | float) and key not in TEXTS else None


def cut(key: str, text: str) -> str:
    most = MOST_MESSAGE if key == "message" else MOST_NAME
    kept = most - NOTE
    return text if len(text) <= most else f"{text[:kept]}… ({len(text) - kept} more characters)"


def cut_traceback(text: str) -> str:
    """Its end says what happened, and where."""
    left_out = len(text) - MOST_TRACEBACK + NOTE
    return text if len(text) <= MOST_TRACEBACK else f"({left_out} more characters) …{text[left_out:]}"
