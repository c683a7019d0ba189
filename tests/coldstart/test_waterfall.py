"""A timeline says what held the start up."""

import json
from typing import Any

import pytest

from stoker.coldstart.timeline import Row
from stoker.coldstart.waterfall import bottleneck, critical_path, moved_bytes, trace_events


def row(name: str, start: float, end: float, **facts: Any) -> Row:
    return Row(name, start, end - start, 0, facts)


def fetch(start: float, end: float, slot_wait_s: float, chunk_wait_s: float) -> Row:
    return row("fetch weights", start, end, slot_wait_s=slot_wait_s, chunk_wait_s=chunk_wait_s)


def rounded(path: list[tuple[str, float]]) -> list[tuple[str, float]]:
    return [(name, round(seconds, 6)) for name, seconds in path]


def test_one_after_the_other():
    rows = [row("queue wait", 0, 1), row("fork", 1, 1.5), row("load", 1.5, 4), row("run", 0, 9)]
    assert rounded(critical_path(rows)) == [("queue wait", 1), ("fork", 0.5), ("load", 2.5)]
    assert bottleneck(rows) == ("load", 2.5)


def test_what_ends_early_beside_something_longer_is_not_on_the_path():
    rows = [row("queue wait", 0, 1), row("import", 1, 2), row("fetch", 1, 6), row("first forward", 6, 6.5)]
    assert rounded(critical_path(rows)) == [("queue wait", 1), ("fetch", 5), ("first forward", 0.5)]


def test_a_gap_is_nobody_s():
    assert rounded(critical_path([row("a", 0, 1), row("b", 3, 4)])) == [("a", 1), ("b", 1)]


@pytest.mark.parametrize(
    ("slot_wait_s", "chunk_wait_s", "slowest"), [(0.1, 3.0, "fetch weights"), (3.0, 0.1, "upload weights")]
)
def test_of_fetch_and_upload_the_one_that_was_waited_for(slot_wait_s: float, chunk_wait_s: float, slowest: str):
    rows = [row("fork", 0, 0.2), fetch(0, 5, slot_wait_s, chunk_wait_s), row("upload weights", 0.2, 5.1)]
    found = bottleneck(rows)
    assert found and found[0] == slowest


def test_nothing_recorded():
    assert critical_path([]) == [] and bottleneck([]) is None
    assert bottleneck([row("run", 0, 1)]) is None


def test_a_trace_has_every_phase_in_microseconds():
    events = trace_events([fetch(0.5, 2, 0, 0), row("run", 0, 3)], 7, "job x")
    assert events[0] == {"ph": "M", "pid": 7, "tid": 0, "name": "process_name", "args": {"name": "job x"}}
    assert [(e["name"], e["ts"], e["dur"], e["tid"]) for e in events[1:]] == [
        ("fetch weights", 500_000, 1_500_000, 0),
        ("run", 0, 3_000_000, 1),
    ]
    assert json.loads(json.dumps(events)) == events


@pytest.mark.parametrize(
    ("name", "moved"), [("fetch weights", 7), ("upload weights", 7), ("allocate KV cache", 0), ("register ring", 0)]
)
def test_reserved_memory_is_not_moved(name: str, moved: int):
    assert moved_bytes(Row(name, 0.0, 1.0, 7, {})) == moved
