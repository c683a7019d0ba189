"""What a function's result may be made of, so that it can be carried and shown everywhere."""

from typing import Any

MAX_DEPTH = 100
SCALARS = (type(None), bool, int, float, str, bytes)
KEYS = (str, bool, int, float, bytes)


class BadValue(TypeError):
    """A result that can't be sent; the message says what is wrong with it."""


def check(value: Any, depth: int = MAX_DEPTH) -> None:
    """Raises BadValue for what msgpack or JSON can't carry: other types, odd keys, deep nesting, huge integers."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, KEYS):
                raise BadValue(f"a key of the result is a {type(key).__name__}; keys must be text or numbers")
        parts = list(value.values())
    elif isinstance(value, list | tuple):
        parts = list(value)
    else:
        check_scalar(value)
        return
    if not depth:
        raise BadValue(f"the result is nested deeper than {MAX_DEPTH} levels")
    for part in parts:
        check(part, depth - 1)


def check_scalar(value: Any) -> None:
    if not isinstance(value, SCALARS):
        raise BadValue(
            f"a result of type {type(value).__name__} can't be sent; return numbers, text, bytes, lists, dicts or None"
        )
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise BadValue("the result holds an integer that doesn't fit into 64 bits; return it as text")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadValue("the result holds text with half of a surrogate pair") from error
