"""A job as clients see it."""

from collections.abc import Mapping
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from stoker.coldstart.timeline import Timeline
from stoker.queue.records import Job, JobState, function_of
from stoker.runtime.gateway.errors import ErrorObject, job_failed
from stoker.runtime.gateway.outcome import outcome_of_job, unpacked
from stoker.runtime.spec import short_name


class JobError(ErrorObject):
    """`traceback` is the one of the function's own code."""

    traceback: str | None


class JobLinks(TypedDict):
    self: str
    events: str


class Phase(TypedDict):
    """Seconds are counted from the start of the job's first phase."""

    name: str
    start_s: float
    seconds: float
    bytes: int
    facts: dict[str, Any]


class JobObject(TypedDict):
    """Times are unix seconds. `wait_reason` and `queue_position` are null unless the job waits."""

    id: str
    object: Literal["job"]
    function: str
    state: JobState
    wait_reason: str | None
    queue_position: int | None
    attempt: int
    max_attempts: int
    enqueued_at: float
    started_at: float | None
    finished_at: float | None
    timeline: list[Phase]
    error: JobError | None
    result: Any
    usage: dict[str, Any] | None
    links: JobLinks


class JobPage(TypedDict):
    """`has_more`: the next page starts with `after` set to the last job's id."""

    object: Literal["list"]
    data: list[JobObject]
    has_more: bool


class SubmittedJob(TypedDict):
    """`wait_reason` is there when a client's `Prefer: wait` ran out while the job still waited."""

    id: str
    object: Literal["job"]
    function: str
    state: JobState
    wait_reason: NotRequired[str]
    links: JobLinks


def job_object(job: Job, reason: str) -> JobObject:
    outcome = outcome_of_job(job)
    return {
        "id": job.id,
        "object": "job",
        "function": short_name(job.function),
        "state": job.state,
        "wait_reason": reason or None,
        "queue_position": job.queued_ahead,
        "attempt": job.attempt,
        "max_attempts": job.max_attempts,
        "enqueued_at": job.enqueued_ms / 1000,
        "started_at": seconds(job.started_ms),
        "finished_at": seconds(job.finished_ms),
        "timeline": phases(unpacked(job.notes)),
        "error": shown_error(job.state, outcome.error),
        "result": shown_result(outcome.result),
        "usage": outcome.usage or None,
        "links": links(job.id),
    }


def submitted_object(job_id: str, state: JobState, reason: str = "") -> SubmittedJob:
    job: SubmittedJob = {
        "id": job_id,
        "object": "job",
        "function": short_name(function_of(job_id)),
        "state": state,
        "links": links(job_id),
    }
    return {**job, "wait_reason": reason} if reason else job


def location(job_id: str) -> str:
    return f"/v1/jobs/{job_id}"


def links(job_id: str) -> JobLinks:
    return {"self": location(job_id), "events": f"{location(job_id)}/events"}


def seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def phases(notes: Mapping[str, Any] | None) -> list[Phase]:
    rows = Timeline.table((notes or {}).get("timeline") or [])
    return [Phase(**row._asdict()) for row in rows]


def shown_error(state: JobState, error: Mapping[str, Any] | None) -> JobError | None:
    """A job that waits for its next attempt shows why the last one failed; one that succeeded shows nothing."""
    if state is JobState.SUCCEEDED or not (error or state.terminal):
        return None
    shown: JobError = {**job_failed(state, error).error, "traceback": (error or {}).get("traceback")}
    return shown


def shown_result(result: Mapping[str, Any] | None) -> Any:
    """A function's own value; a language model's text with its finish reason and usage."""
    if result is None:
        return None
    return result["value"] if result.keys() == {"value"} else dict(result)
