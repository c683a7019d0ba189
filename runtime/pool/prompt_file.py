"""Blocks of the prompt cache as one file, the third tier's form: what was computed for hot prompts, their tokens and
keys, what they were computed with, and a seal over all of it. No tensors: the host agent reads it too.

The seal is an HMAC with a key of the deployment. A file that is damaged, cut short, or was written by somebody else
fails it, and is never read further.
"""

import hashlib
import hmac
import math
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

MAGIC = b"stoker prompts 1\n"
"""Changes with how a block's bytes lie."""
LENGTHS = struct.Struct("<dQ")
"""How many seconds it takes to compute the longest prompt in it, and how many bytes of the head follow."""
BEGIN_BYTES = len(MAGIC) + LENGTHS.size
SEAL_BYTES = 32
PIECE = 4 << 20
TOKEN_BYTES = 4


class PromptsUnusable(ValueError):
    """Not what is asked for, or not as it was written. Prompts are computed instead."""


class Row(NamedTuple):
    """One block: the row of the block that it continues (-1: first of its chain), and how often it was of use."""

    key: bytes
    parent: int
    uses: int
    tokens: bytes


class Head(NamedTuple):
    """`made_for` is what the agent knows (whose prompts), `computed` what the engine does (with what, and how a block
    lies). The first block is at byte `start`; each has `computed["block_bytes"]`."""

    made_for: dict[str, Any]
    computed: dict[str, Any]
    rows: list[Row]
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.rows) * self.computed["block_bytes"]


def pack_head(
    made_for: Mapping[str, Any], computed: Mapping[str, Any], rows: Sequence[Row], worth_s: float = 0.0
) -> bytes:
    body: Any = msgpack.packb([made_for, computed, [list(row) for row in rows]])
    return MAGIC + LENGTHS.pack(worth_s, len(body)) + body


def seconds_worth(begin: bytes | bytearray) -> float:
    """From a file's first BEGIN_BYTES, whose seal is not looked at: how long to wait for the rest is worth while."""
    if not begin.startswith(MAGIC):
        return 0.0
    seconds, _ = LENGTHS.unpack(begin[len(MAGIC) :])
    return seconds if 0 <= seconds < math.inf else 0.0


def read_head(path: Path) -> Head:
    """Of a sealed file, whose seal is not looked at. Raises PromptsUnusable or OSError."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        begin = file.read(BEGIN_BYTES)
        if not begin.startswith(MAGIC) or len(begin) < BEGIN_BYTES:
            raise PromptsUnusable("it isn't in this form, or cut short")
        start = BEGIN_BYTES + LENGTHS.unpack(begin[len(MAGIC) :])[1]
        body = file.read(start - BEGIN_BYTES) if start <= size else b""
    try:
        made_for, computed, rows = msgpack.unpackb(body, strict_map_key=False)
        return checked(Head(made_for, computed, [Row(*row) for row in rows], start), size)
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise PromptsUnusable(f"its head makes no sense: {error!r}") from error


def checked(head: Head, size: int) -> Head:
    if head.end + SEAL_BYTES != size:
        raise ValueError(f"it is for {head.end + SEAL_BYTES} bytes, not {size}")
    for place, row in enumerate(head.rows):
        if not -1 <= row.parent < place:
            raise ValueError(f"block {place} comes before the one that it continues")
        if len(row.tokens) != head.computed["block_tokens"] * TOKEN_BYTES:
            raise ValueError(f"block {place} has tokens of {len(row.tokens)} bytes")
    return head


def seal(path: Path, key: bytes) -> None:
    """Completes a file of head and blocks."""
    digest = hmac.new(key, digestmod=hashlib.sha256)
    with open(path, "r+b") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
        file.write(digest.digest())


def check_seal(data: memoryview, key: bytes) -> None:
    """Raises PromptsUnusable unless every byte is as it was sealed with this key."""
    if not hmac.compare_digest(hmac.digest(key, data[:-SEAL_BYTES], hashlib.sha256), data[-SEAL_BYTES:]):
        raise PromptsUnusable("it is damaged, cut short, or another deployment's")


def same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises PromptsUnusable with the first field that differs."""
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise PromptsUnusable(f"its {name} is {found.get(name)!r}, not {wanted.get(name)!r}")
