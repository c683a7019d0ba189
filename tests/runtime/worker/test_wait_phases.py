"""Where a job's time went before it ran."""

import pytest

from stoker.runtime.worker.wait_phases import phase, waiting, waiting_for_start

START = [phase("fetch code", 100, 120), phase("process start", 120, 190), {**phase("load", 150, 190), "bytes": 80}]


def spans(records: list[dict]) -> list[tuple[str, int, int]]:
    return [(each["name"], each["start_ns"], each["end_ns"]) for each in records]


def test_a_job_that_was_there_before_the_start_waits_before_and_behind_it() -> None:
    records = waiting_for_start(40, 100, 190, 250, START)
    waits = [("queue wait", 40, 100), ("queue wait", 190, 250)]
    assert spans(records) == [*waits, ("fetch code", 100, 120), ("process start", 120, 190), ("load", 150, 190)]
    assert records[-1]["bytes"] == 80


@pytest.mark.parametrize(
    ("came", "left", "moved"),
    [
        (110, [("fetch code", 110, 120), ("process start", 120, 190), ("load", 150, 190)], 80),
        (160, [("process start", 160, 190), ("load", 160, 190)], 60),
    ],
)
def test_what_had_passed_when_it_came_is_none_of_its_time(came: int, left: list[tuple], moved: int) -> None:
    records = waiting_for_start(came, 100, 190, 190, START)
    assert spans(records) == left and records[-1]["bytes"] == moved
    assert max(end for *_, end in spans(records)) - min(start for _, start, _ in spans(records)) == 190 - came


def test_a_clock_that_jumps_makes_no_negative_wait() -> None:
    assert spans(waiting(90, 70)) == [("queue wait", 90, 90)]
