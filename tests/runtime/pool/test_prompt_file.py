import math
from pathlib import Path
from typing import Any

import pytest

from stoker.runtime.pool.prompt_file import (
    BEGIN_BYTES,
    LENGTHS,
    MAGIC,
    PromptsUnusable,
    Row,
    check_seal,
    pack_head,
    read_head,
    same,
    seal,
    seconds_worth,
)

KEY = b"k" * 32
COMPUTED = {"block_bytes": 100, "block_tokens": 2, "revision": "r"}
ROWS = [Row(b"a" * 32, -1, 3, b"12345678"), Row(b"b" * 32, 0, 2, b"abcdefgh")]


def written(path: Path, rows: list[Row] = ROWS, computed: dict[str, Any] = COMPUTED, blocks: int = 2) -> Path:
    path.write_bytes(pack_head({"function": "chat"}, computed, rows) + bytes(range(100)) * blocks)
    seal(path, KEY)
    return path


def check(path: Path, key: bytes = KEY) -> None:
    check_seal(memoryview(path.read_bytes()), key)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "file")
    check(path)
    head = read_head(path)
    assert (head.made_for, head.computed, head.rows) == ({"function": "chat"}, COMPUTED, ROWS)
    assert path.read_bytes()[head.start : head.end] == bytes(range(100)) * 2


def test_every_byte_counts(tmp_path: Path) -> None:
    whole = written(tmp_path / "file").read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        with pytest.raises(PromptsUnusable, match="damaged"):
            check_seal(memoryview(damaged), KEY)
    for length in range(len(whole)):
        with pytest.raises(PromptsUnusable, match="cut short"):
            check_seal(memoryview(whole)[:length], KEY)


def test_another_deployments_file_is_not_taken(tmp_path: Path) -> None:
    with pytest.raises(PromptsUnusable, match="another deployment's"):
        check(written(tmp_path / "file"), b"other" * 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": [ROWS[0], ROWS[1]._replace(parent=1)]}, "before the one that it continues"),
        ({"rows": [ROWS[0]._replace(parent=-2)], "blocks": 1}, "before the one that it continues"),
        ({"rows": [ROWS[0]._replace(tokens=b"1234")], "blocks": 1}, "tokens of 4 bytes"),
        ({"computed": {"block_tokens": 2}}, "makes no sense"),
        ({"blocks": 1}, "bytes, not"),
        ({"blocks": 3}, "bytes, not"),
    ],
)
def test_a_head_that_makes_no_sense_is_refused_in_words(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PromptsUnusable, match=message):
        read_head(written(tmp_path / "file", **changes))


def test_what_waiting_is_worth_stands_at_the_beginning() -> None:
    assert seconds_worth(pack_head({}, COMPUTED, ROWS, 1.5)[:BEGIN_BYTES]) == 1.5
    assert seconds_worth(b"x" * BEGIN_BYTES) == 0
    for nonsense in (-1.0, math.nan, math.inf):
        assert seconds_worth(MAGIC + LENGTHS.pack(nonsense, 0)) == 0


@pytest.mark.parametrize("content", [b"", b"stoker", b"x" * 500, b"stoker prompts 1\n" + b"\xff" * 8, bytes(100)])
def test_anything_else_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(PromptsUnusable):
        read_head(path)


def test_what_differs_is_named() -> None:
    same({"a": 1}, {"a": 1})
    with pytest.raises(PromptsUnusable, match="its revision is 'old', not 'new'"):
        same({"a": 1, "revision": "old"}, {"a": 1, "revision": "new"})
    with pytest.raises(PromptsUnusable, match="its epoch is 'x', not None"):
        same({"epoch": "x"}, {})
