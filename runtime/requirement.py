"""What is checked of a declaration, and the error that says what to write instead."""

from dataclasses import fields
from typing import Any


class InvalidSpec(ValueError):
    """A function was declared with a value that can't work; the message says which and what to write instead."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidSpec(message)


def reject_unknown(what: str, values: dict[str, Any], kind: type) -> None:
    unknown = set(values) - {f.name for f in fields(kind)}
    require(not unknown, f"unknown {what} field(s): {', '.join(sorted(unknown))}")
