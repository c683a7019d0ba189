"""Large results: what takes long is done in a thread, and JSON is written piece by piece, so that others are answered
meanwhile: Python's lock is free between two pieces."""

import asyncio
import base64
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from stoker.runtime.gateway.sse import json_bytes

LARGE = 1 << 20
"""Bytes of a packed result."""
TEXT, MANY = 1 << 18, 1 << 10
"""Characters or parts of one piece."""
THREES = 3 << 18
"""Bytes that are encoded without a rest."""
SHORT = 1_000

T = TypeVar("T")


async def aside(size: int, work: Callable[..., T], *given: Any) -> T:
    """`work(*given)`; in a thread if it is about a large result."""
    return await asyncio.to_thread(work, *given) if size >= LARGE else work(*given)


def base64_of(data: bytes) -> str:
    return "".join(base64.b64encode(data[at : at + THREES]).decode() for at in range(0, len(data), THREES))


def list_of(array: np.ndarray) -> Any:
    """What `tolist` makes of it."""
    if array.size <= TEXT or not array.ndim:
        return array.tolist()
    if array.ndim > 1:
        return [list_of(row) for row in array]
    return [value for at in range(0, len(array), TEXT) for value in array[at : at + TEXT].tolist()]


def json_by_pieces(value: Any) -> bytes:
    """The bytes that `json_bytes` makes of the value."""
    return b"".join(pieces(value))


def pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, str) and len(value) > TEXT:
        yield b'"'
        yield from (json_bytes(value[at : at + TEXT])[1:-1] for at in range(0, len(value), TEXT))
        yield b'"'
    elif isinstance(value, list) and value:
        yield from pieces_of_list(value)
    elif isinstance(value, dict) and value:
        for before, (key, part) in zip(commas(b"{"), value.items(), strict=False):
            yield before + json_bytes({key: None})[1 : -len(b"null}")]
            yield from pieces(part)
        yield b"}"
    else:
        yield json_bytes(value)


def pieces_of_list(value: list[Any]) -> Iterator[bytes]:
    before = commas(b"[")
    for at in range(0, len(value), MANY):
        parts = value[at : at + MANY]
        if all(is_small(part) for part in parts):
            yield next(before) + json_bytes(parts)[1:-1]
            continue
        for part in parts:
            yield next(before)
            yield from pieces(part)
    yield b"]"


def commas(first: bytes) -> Iterator[bytes]:
    yield first
    while True:
        yield b","


def is_small(value: Any) -> bool:
    if isinstance(value, list | dict):
        return len(value) <= 8 and all(isinstance(part, int | float | None) for part in value)
    return not isinstance(value, str | bytes) or len(value) <= SHORT
