"""What is told of an exception has a size, and room for the lines that lead to it."""

import pytest

from stoker.queue.records import pack
from stoker.runtime.inputs import Misfit
from stoker.runtime.worker.user_errors import Allowance, input_error, user_error


def test_a_long_message_leaves_room_for_the_traceback() -> None:
    try:
        raise ValueError("start" + "x" * 60_000_000)
    except ValueError as error:
        record = user_error(error)
    assert record["message"].startswith("ValueError: startxxx") and "more characters" in record["message"]
    assert "test_user_errors.py" in record["traceback"] and "raise ValueError" in record["traceback"]
    assert record["code"] == "ValueError" and len(pack(record)) < 16_384


def test_a_deep_traceback_keeps_its_end() -> None:
    def dive(depth: int) -> int:
        return 1 // depth + climb(depth - 1)

    def climb(depth: int) -> int:
        return dive(depth) + 1

    try:
        dive(300)
    except ZeroDivisionError as error:
        record = user_error(error)
    assert record["traceback"].endswith("ZeroDivisionError: integer division or modulo by zero\n")
    assert record["traceback"].startswith("(") and len(pack(record)) < 20_000


def test_a_name_of_any_length_is_cut() -> None:
    long = type("E" * 1_000_000, (Exception,), {})
    assert len(pack(user_error(long("m" * 1_000_000)))) < 16_384
    record = input_error(Misfit("no " + "x" * 1_000_000, "p" * 1_000_000))
    assert record["code"] == "invalid_input" and len(pack(record)) < 8_192


def test_too_little_memory_names_the_limit_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert user_error(MemoryError())["message"] == "MemoryError"
    monkeypatch.setattr(Allowance, "memory_mb", 150)
    assert user_error(MemoryError())["message"] == "MemoryError (it needed more than its memory_mb=150)"
    told = user_error(MemoryError("Unable to allocate 1 GiB"))["message"]
    assert told == "MemoryError: Unable to allocate 1 GiB (it needed more than its memory_mb=150)"
    assert user_error(ValueError())["message"] == "ValueError"
