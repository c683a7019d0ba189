"""Reads a start's timeline: what held it up, and the same as a trace that browsers show."""

from collections.abc import Iterable, Sequence
from typing import Any

from stoker.coldstart.timeline import Row

EPSILON_S = 1e-6
RESERVING = ("allocate", "register")
FETCH, UPLOAD, RUN = "fetch weights", "upload weights", "run"


def critical_path(rows: Sequence[Row]) -> list[tuple[str, float]]:
    """Phases in order, each with the seconds during which nothing else could have ended the start sooner.

    From the end backwards: of the phases that run at a moment, the one that began last is what is waited for; its
    beginning is the next such moment. Fetch and upload of weights overlap: the time in which the upload only waited for
    bytes is the fetch's. Gaps are not listed.
    """
    phases = [without_waits(row, rows) for row in rows if row.name != RUN]
    path: list[tuple[str, float]] = []
    moment = max((row.start_s + row.seconds for row in phases), default=0.0)
    while phases:
        running = [row for row in phases if row.start_s < moment - EPSILON_S]
        if not running:
            break
        latest = max(running, key=lambda row: (min(row.start_s + row.seconds, moment), row.start_s))
        end = min(latest.start_s + latest.seconds, moment)
        path.append((latest.name, end - latest.start_s))
        moment = latest.start_s
    return path[::-1]


def without_waits(row: Row, rows: Sequence[Row]) -> Row:
    """An upload that waited for the fetch more than the other way round begins, in effect, when the fetch ends."""
    fetch = next((other for other in rows if other.name == FETCH), None)
    if row.name != UPLOAD or fetch is None:
        return row
    if fetch.facts.get("slot_wait_s", 0.0) > fetch.facts.get("chunk_wait_s", 0.0):
        return row
    end, start = row.start_s + row.seconds, max(row.start_s, fetch.start_s + fetch.seconds)
    return row._replace(start_s=min(start, end), seconds=max(0.0, end - start))


def moved_bytes(row: Row) -> int:
    """0 for phases whose bytes are the size of memory that they only reserve."""
    return 0 if row.name.startswith(RESERVING) else row.bytes


def bottleneck(rows: Sequence[Row]) -> tuple[str, float] | None:
    """The phase with the most seconds on the critical path."""
    totals: dict[str, float] = {}
    for name, seconds in critical_path(rows):
        totals[name] = totals.get(name, 0.0) + seconds
    return max(totals.items(), key=lambda item: item[1], default=None)


def trace_events(rows: Iterable[Row], process: int = 0, title: str = "") -> list[dict[str, Any]]:
    """Complete events of the Trace Event Format (microseconds), one line per phase: for chrome://tracing or Perfetto.
    `process` tells several timelines in one trace apart."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": title}}
    ]
    for line, row in enumerate(rows):
        span = {"ts": row.start_s * 1e6, "dur": row.seconds * 1e6}
        args = {"bytes": row.bytes, **row.facts}
        events.append({"ph": "X", "pid": process, "tid": line, "name": row.name, **span, "args": args})
    return events
