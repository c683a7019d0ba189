"""Where a job's time went before it ran, as records of its timeline, in CLOCK_MONOTONIC nanoseconds. Pure."""

from collections.abc import Iterable
from typing import Any

Record = dict[str, Any]


def phase(name: str, start_ns: int, end_ns: int) -> Record:
    return {"name": name, "start_ns": start_ns, "end_ns": end_ns}


def waiting(queued: int, claimed: int) -> list[Record]:
    """Of a job that found its replica ready."""
    return [phase("queue wait", queued, max(queued, claimed))]


def waiting_for_start(queued: int, began: int, ready: int, claimed: int, start: Iterable[Record]) -> list[Record]:
    """Of a job that came before its replica was ready. What of the start had passed when it came is none of its time;
    behind the start it waits for its turn."""
    waits = [phase("queue wait", *span) for span in ((queued, began), (ready, claimed)) if span[0] < span[1]]
    return [*waits, *(since(queued, record) for record in start if record["end_ns"] > queued)]


def since(moment: int, record: Record) -> Record:
    """What of a phase was behind the moment, with as many of its bytes as would have moved then at its rate."""
    whole, rest = record["end_ns"] - record["start_ns"], record["end_ns"] - moment
    if rest >= whole:
        return record
    part = {"bytes": record["bytes"] * rest // whole} if "bytes" in record else {}
    return {**record, **part, "start_ns": moment}
