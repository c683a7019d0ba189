import os
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.queue.records import (
    JobState,
    NewJob,
    RecordVersionError,
    function_of,
    made_at_ms,
    new_job_id,
    pack,
    unpack,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.binary() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=4),
    max_leaves=10,
)


@given(VALUES)
def test_unpack_undoes_pack(value: object) -> None:
    assert unpack(pack(value)) == value


@pytest.mark.parametrize("data", [b"", b"\x00\xc0", b"\x02\xc0"])
def test_other_versions_are_refused(data: bytes) -> None:
    with pytest.raises(RecordVersionError, match="version byte"):
        unpack(data)


@pytest.mark.parametrize("function", ["f", "text-to-image", "a_b-c2"])
def test_job_id_names_its_function(function: str) -> None:
    job_id = new_job_id(function)
    assert re.fullmatch(rf"{function}-[0-9A-HJKMNP-TV-Z]{{26}}", job_id)
    assert function_of(job_id) == function


def test_job_ids_are_unique_and_sort_by_time() -> None:
    early = [new_job_id("f") for _ in range(100)]
    time.sleep(0.002)
    late = [new_job_id("f") for _ in range(100)]
    assert len(set(early + late)) == 200
    assert max(early) < min(late)


def test_a_forked_process_makes_other_ids() -> None:
    new_job_id("f")
    ours, theirs = os.pipe()
    if (child := os.fork()) == 0:
        os.write(theirs, " ".join(new_job_id("f")[-16:] for _ in range(10)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    digits = os.read(ours, 1000).decode().split()
    os.close(ours)
    os.close(theirs)
    assert len(digits) == 10 and not {new_job_id("f")[-16:] for _ in range(300)} & set(digits)


def test_a_job_id_tells_when_it_was_made() -> None:
    before = time.time_ns() // 1_000_000
    made = made_at_ms(new_job_id("f"))
    assert before <= made <= time.time_ns() // 1_000_000


@pytest.mark.parametrize("text", ["", "f", "f-", "-01M8P9NXY7T1PMWEYN7D70NQY6", "f-01m8p9nxy7t1pmweyn7d70nqy6", "f-01"])
def test_what_is_no_job_id(text: str) -> None:
    with pytest.raises(ValueError, match="not a job id"):
        function_of(text)


@pytest.mark.parametrize(
    "change",
    [
        {"id": new_job_id("g")},
        {"priority": 3},
        {"gateway": "a,b"},
        {"max_attempts": 0},
        {"retention_ms": 0},
        {"cost": -1.0},
        {"cost": float("nan")},
        {"cost": float("inf")},
        {"delay_ms": -1},
        {"start_within_ms": -5},
    ],
)
def test_impossible_jobs_are_refused(change: dict[str, object]) -> None:
    values: dict[str, object] = {"id": new_job_id("f"), "function": "f", "tenant": "a", "payload": b""} | change
    with pytest.raises(ValueError):
        NewJob(**values)  # type: ignore[arg-type]


def test_terminal_states() -> None:
    assert {state for state in JobState if not state.terminal} == {
        JobState.QUEUED,
        JobState.RETRYING,
        JobState.RUNNING,
    }
