"""A job as clients see it."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from stoker.coldstart.timeline import Timeline
from stoker.queue.records import Attempt, Job, JobState, function_of
from stoker.runtime.error_record import bounded
from stoker.runtime.gateway.errors import ErrorObject, job_failed
from stoker.runtime.gateway.media import shown
from stoker.runtime.gateway.outcome import Outcome, outcome_of_job, unpacked
from stoker.runtime.spec import owner_of, short_name
from stoker.runtime.tenancy.api_key import OPERATOR


class JobError(ErrorObject):
    """`status`: what a client is answered that waits for the job by calling its function. `traceback` is the one of the
    function's own code, for the function's owner."""

    status: int
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


class AttemptObject(TypedDict):
    """One claim of the job by a `worker`, which is one life of a host's agent. `ended`: "running", "lost" (with its
    worker), "handed_back" (for no fault of the job's; its number is given again), or as the job ended."""

    number: int
    worker: str
    started_at: float
    ended_at: float | None
    ended: str
    error: str | None
    usage: dict[str, Any] | None


class JobObject(TypedDict):
    """Times are unix seconds; `started_at`: when its attempt began, null while it waits. `isolation` says where it ran:
    in a process of its function alone, or in one engine with other tenants' requests; null before it did. Null unless
    the job waits: `wait_reason`, `queue_position` and `eta_s` (seconds until it is likely to start). `cost_usd` is null
    until it is over. `route` is what a router decided of it: `router`, `target`, `reason`, `detail`, `score`,
    `instead_of` and `because`."""

    id: str
    object: Literal["job"]
    function: str
    state: JobState
    wait_reason: str | None
    queue_position: int | None
    eta_s: float | None
    attempt: int
    max_attempts: int
    enqueued_at: float
    started_at: float | None
    finished_at: float | None
    isolation: Literal["own-process", "shared-engine"] | None
    timeline: list[Phase]
    attempts: list[AttemptObject]
    error: JobError | None
    result: Any
    usage: dict[str, Any] | None
    cost_usd: float | None
    webhook_url: str | None
    route: dict[str, Any] | None
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


def job_object(
    job: Job, reason: str = "", *, eta_s: float | None = None, cost_usd: float | None = None, raw: bool = False
) -> JobObject:
    """`raw`: the result as it is, for msgpack."""
    outcome = outcome_of_job(job)
    notes = unpacked(job.notes) or {}
    return {
        "id": job.id,
        "object": "job",
        "function": short_name(job.function),
        "state": job.state,
        "wait_reason": reason or None,
        "queue_position": job.queued_ahead,
        "eta_s": None if eta_s is None else round(eta_s, 3),
        "attempt": job.attempt,
        "max_attempts": job.max_attempts,
        "enqueued_at": job.enqueued_ms / 1000,
        "started_at": seconds(job.started_ms),
        "finished_at": seconds(job.finished_ms),
        "isolation": notes.get("isolation"),
        "timeline": phases(job, notes),
        "attempts": attempts(job, outcome),
        "error": shown_error(job, outcome.error),
        "result": shown_result(outcome.result, raw=raw),
        "usage": outcome.usage or None,
        "cost_usd": cost_usd,
        "webhook_url": job.webhook or None,
        "route": unpacked(job.route),
        "links": links(job.id),
    }


def attempts(job: Job, outcome: Outcome) -> list[AttemptObject]:
    """All that are known, the first one first. A job that waits, or ended while it did, has only past ones."""
    past = [past_attempt(each) for each in job.past_attempts]
    return past if job.started_ms is None else [*past, last_attempt(job, outcome)]


def past_attempt(each: Attempt) -> AttemptObject:
    error = unpacked(each.error)
    return {
        "number": each.number,
        "worker": each.worker,
        "started_at": each.began_ms / 1000,
        "ended_at": each.ended_ms / 1000,
        "ended": each.how,
        "error": bounded(error)["message"] if error else None,
        "usage": unpacked(each.usage),
    }


def last_attempt(job: Job, outcome: Outcome) -> AttemptObject:
    lost = job.state is JobState.DEAD and job.reason.startswith("lost its worker")
    error = (outcome.error or {}).get("message") if job.state.terminal else None
    return {
        "number": job.attempt,
        "worker": job.worker,
        "started_at": (job.started_ms or 0) / 1000,
        "ended_at": seconds(job.finished_ms),
        "ended": "lost" if lost else str(job.state),
        "error": error,
        "usage": outcome.usage or None if job.state.terminal else None,
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


def phases(job: Job, notes: Mapping[str, Any]) -> list[Phase]:
    """From the job's arrival on: earlier attempts, each behind its wait, and then what the attempt says of itself whose
    notes these are."""
    rows = Timeline.table(notes.get("timeline") or [])
    if not rows:
        return []
    since = notes.get("since_ms", job.enqueued_ms)
    earlier = [each for each in job.past_attempts if each.ended_ms <= since]
    later_s = (since - job.enqueued_ms) / 1000 if earlier else 0.0
    own = [Phase(**row._replace(start_s=row.start_s + later_s)._asdict()) for row in rows]
    return [*past_phases(job.enqueued_ms, earlier), *own]


def past_phases(enqueued_ms: int, attempts: Iterable[Attempt]) -> Iterator[Phase]:
    ended = enqueued_ms
    for each in attempts:
        name = f"attempt {each.number}: {each.how.replace('_', ' ')}"
        for called, began, end in (("queue wait", ended, each.began_ms), (name, each.began_ms, each.ended_ms)):
            yield Phase(
                name=called, start_s=(began - enqueued_ms) / 1000, seconds=(end - began) / 1000, bytes=0, facts={}
            )
        ended = each.ended_ms


def shown_error(job: Job, error: Mapping[str, Any] | None) -> JobError | None:
    """A job that waits for its next attempt shows why the last one failed; one that succeeded shows nothing. Who calls
    a function that is not their own doesn't see its code."""
    if job.state is JobState.SUCCEEDED or not (error or job.state.terminal):
        return None
    of_owner = owner_of(job.function) == ("" if job.tenant == OPERATOR else job.tenant)
    traceback = (error or {}).get("traceback") if of_owner else None
    failure = job_failed(job.state, error)
    return {**failure.error, "status": failure.status, "traceback": traceback}


def shown_result(result: Mapping[str, Any] | None, *, raw: bool = False) -> Any:
    """A function's own value, as JSON can say it unless `raw`; a language model's text with its finish reason and
    usage."""
    if result is None:
        return None
    value = result["value"] if result.keys() == {"value"} else dict(result)
    return value if raw else shown(value)
