"""Error records have a size, whoever wrote them."""

from typing import Any

import pytest

from stoker.queue.records import pack
from stoker.runtime.error_record import MOST_MESSAGE, MOST_TRACEBACK, bounded

USUAL = {"type": "function_error", "message": "ValueError: no", "code": "ValueError", "traceback": "File m.py\n"}


@pytest.mark.parametrize(
    "record",
    [
        USUAL,
        {**USUAL, "param": None},
        {"type": "cold_start_error", "message": "gone", "code": None, "facts": {"bytes": 3}},
    ],
)
def test_a_usual_record_stays_as_it_is(record: dict[str, Any]) -> None:
    assert bounded(record) == record


def test_a_long_message_keeps_its_start_and_a_long_traceback_its_end() -> None:
    long = bounded({**USUAL, "message": "start" + "x" * 60_000_000, "traceback": "y" * 60_000_000 + "end"})
    assert long["message"].startswith("start") and long["message"].endswith(" more characters)")
    assert long["traceback"].endswith("end") and long["traceback"].startswith("(")
    assert len(long["message"]) <= MOST_MESSAGE and len(long["traceback"]) <= MOST_TRACEBACK
    assert bounded(long) == long


@pytest.mark.parametrize(
    "hostile",
    [
        None,
        "x" * 1_000_000,
        ["message"],
        {},
        {"message": {"deep": "x" * 1_000_000}, "code": ["x"] * 1_000_000},
        {"type": "x" * 1_000_000, "message": "m", "code": "y" * 1_000_000, "param": "z" * 1_000_000},
        {"message": "m", "facts": ["x" * 1_000_000]},
        {"message": "m", **{f"key{number}": "x" * 256 for number in range(100_000)}},
        {"message": "m", "k" * 1_000_000: 1, 7: "x" * 1_000_000, "more": ["x" * 1_000_000]},
    ],
)
def test_whatever_it_is_there_is_a_small_record_with_a_message(hostile: Any) -> None:
    record = bounded(hostile)
    assert isinstance(record["message"], str) and record["message"]
    assert len(pack(record)) < 32_768
    assert all(
        record[key] is None or isinstance(record[key], str) for key in ("type", "code", "param") if key in record
    )
