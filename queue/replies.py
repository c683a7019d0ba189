"""From the scripts' raw replies to records."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from stoker.queue.records import (
    Attempt,
    Backlog,
    Claim,
    Enqueued,
    IdempotencyMismatch,
    Job,
    JobState,
    QueueFull,
    StoredChunk,
)

Outcome = tuple[bytes | None, bytes | None, bytes | None, bytes | None]

# What a record leaves out (see jobs.lua).
USUAL_MAX, USUAL_PRIORITY = 3, 1

NO_OUTCOME: Outcome = (None, None, None, None)


def enqueued(job_id: str, reply: Any) -> Enqueued:
    """Raises QueueFull or IdempotencyMismatch when the script refused."""
    if isinstance(reply, int):
        return Enqueued(job_id, True, False, reply, JobState.QUEUED)
    verdict = reply[0]
    if verdict == b"full":
        _, limit, waiting, most, retry_after_ms = reply
        name = limit.decode()
        message = f"{name}: {waiting} jobs are waiting and the limit is {most}"
        raise QueueFull(message, limit=name, retry_after_s=retry_after_ms / 1000)
    if verdict == b"rate":
        _, limit, most, retry_after_ms = reply
        name = limit.decode()
        message = f"{name}: the limit of {float(most):g} is used up for now"
        raise QueueFull(message, limit=name, retry_after_s=retry_after_ms / 1000)
    if verdict == b"mismatch":
        raise IdempotencyMismatch(f"this idempotency key belongs to a different request, job {reply[1].decode()}")
    _, stored, created, wake, queued, state = reply
    return Enqueued(stored.decode(), bool(created), bool(wake), queued, JobState(state.decode()))


def claim(function: str, row: list[Any]) -> Claim:
    job_id, tenant, payload, fence, attempt, most, stream, gateway, since_ms, claimed_ms, run_within, *rest = row
    entries, priority, weight = rest
    return Claim(
        job_id.decode(),
        function,
        tenant.decode(),
        payload,
        fence,
        attempt,
        most,
        bool(stream),
        gateway.decode(),
        min(since_ms, claimed_ms),
        claimed_ms,
        run_within,
        stored_chunks(entries) if entries else [],
        priority,
        float(weight),
    )


def stored_chunks(entries: Iterable[Any]) -> list[StoredChunk]:
    """Stream entries without the markers between attempts."""
    parsed = (entry(item, values) for item, values in entries)
    return [StoredChunk(item.id, item.fence, item.attempt, item.data) for item in parsed if item.data is not None]


def fields(values: Any) -> dict[bytes, bytes]:
    """redis-py parses XRANGE's fields to a dict; inside a script's reply they stay a flat list."""
    return values if isinstance(values, dict) else dict(zip(values[::2], values[1::2], strict=True))


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a job's stream: a chunk, or (`data` is None) the mark where an attempt ended."""

    id: str
    fence: int
    attempt: int
    data: bytes | None


@dataclass(frozen=True, slots=True)
class View:
    """What a watcher missed: `past` is the fence of the last ended attempt, no `outcome` when too large. `whole`: there
    are no entries behind these."""

    state: JobState
    attempt: int
    past: int
    reason: str
    outcome: Outcome | None
    entries: list[Entry]
    whole: bool = True


def views(reply: list[Any]) -> list[View | None]:
    return [view(row) if row else None for row in reply]


def view(row: list[Any]) -> View:
    state, attempt, past, reason, packed, stream, whole = row
    return View(
        JobState(state.decode()),
        int(attempt),
        int(past),
        reason.decode(),
        outcome(packed) if packed is not None else None,
        [entry(item, values) for item, values in stream],
        bool(whole),
    )


def entry(item: bytes, values: Any) -> Entry:
    """A mark, and a chunk that an earlier version stored, name fence and attempt; else the fence is in the id, and the
    one field is the attempt with its data."""
    parts = fields(values)
    if b"f" in parts:
        return Entry(item.decode(), int(parts[b"f"]), int(parts[b"a"]), parts.get(b"d"))
    ((attempt, data),) = parts.items()
    return Entry(item.decode(), int(item.partition(b"-")[0]), int(attempt), data)


def job(function: str, job_id: str, reply: list[Any]) -> Job:
    flat, packed, ahead = reply
    row = {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}
    result, error, usage, notes = outcome(packed)
    aside = is_aside(row)
    return Job(
        id=job_id,
        function=function,
        tenant=row["tenant"].decode(),
        state=JobState.QUEUED if aside else JobState(row["state"].decode()),
        attempt=int(row.get("attempt", 0)),
        max_attempts=int(row.get("max", USUAL_MAX)),
        priority=int(row.get("priority", USUAL_PRIORITY)),
        stream=row.get("stream") == b"1",
        enqueued_ms=int(row["enqueued"]),
        started_ms=None if aside else number(row.get("began")),
        finished_ms=number(row.get("ended")),
        worker=row.get("worker", b"").decode(),
        reason=row.get("reason", b"").decode(),
        error=error,
        result=result,
        usage=usage,
        notes=notes,
        queued_ahead=ahead,
        webhook=row.get("hook", b"").decode(),
        route=row.get("route", b""),
        past_attempts=past_attempts(row.get("log", b"")),
        metered="metered" in row,
        aside=aside,
        caller=row.get("caller", b"").decode(),
    )


def is_aside(row: dict[str, bytes]) -> bool:
    """Whether the worker that has the job keeps it without running it; `shown_state` in common.lua knows it too."""
    return row["state"] == b"running" and row.get("aside") == row.get("fence")


def past_attempts(log: bytes) -> list[Attempt]:
    unpacker = msgpack.Unpacker(raw=True)
    unpacker.feed(log)
    return [
        Attempt(number, worker.decode(), began, ended, how.decode(), usage or None, error or None)
        for number, worker, began, ended, how, usage, error in unpacker
    ]


def number(value: bytes | None) -> int | None:
    return int(value) if value else None


def outcome(packed: bytes | None) -> Outcome:
    """(result, error, usage, notes), packed by the scripts with false for what is absent."""
    if not packed:
        return NO_OUTCOME
    result, error, usage, notes = (part or None for part in msgpack.unpackb(packed, raw=True))
    return result, error, usage, notes


def backlog(function: str, reply: Sequence[Any]) -> Backlog:
    queued, running, delayed, oldest_ms, drained, arrived, idle_ms, drained_last, cold_start = reply
    rates = float(drained), float(arrived)
    return Backlog(
        function, queued, running, delayed, oldest_ms, *rates, idle_ms, float(drained_last), number(cold_start)
    )
