"""Phases are recorded whatever happens inside them, and print relative to the first."""

import threading
import time

import pytest

from stoker.coldstart.timeline import Timeline


def test_phase_records_duration_and_facts():
    timeline = Timeline()
    with timeline.phase("fetch", connections=8) as facts:
        time.sleep(0.02)
        facts["bytes"] = 77
    (record,) = timeline.records()
    assert record["name"] == "fetch" and record["bytes"] == 77 and record["connections"] == 8
    assert 0.02e9 <= record["end_ns"] - record["start_ns"] < 1e9


def test_phase_is_recorded_when_it_fails():
    timeline = Timeline()
    with pytest.raises(RuntimeError), timeline.phase("fetch"):
        raise RuntimeError
    assert [record["name"] for record in timeline.records()] == ["fetch"]


def test_table_is_relative_and_ordered():
    timeline = Timeline()
    timeline.add("upload", 3_000_000_000, 4_500_000_000, bytes=10, busy_s=1.0)
    timeline.extend([{"name": "fork", "start_ns": 1_000_000_000, "end_ns": 1_500_000_000}])
    rows = Timeline.table(timeline.records())
    assert [(row.name, row.start_s, row.seconds, row.bytes) for row in rows] == [
        ("fork", 0.0, 0.5, 0),
        ("upload", 2.0, 1.5, 10),
    ]
    assert rows[1].facts == {"busy_s": 1.0}
    assert Timeline.table([]) == []


def test_threads_may_record_at_once():
    timeline = Timeline()
    threads = [threading.Thread(target=lambda: [timeline.add("x", 0, 1) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(timeline.records()) == 2000
