"""GET /v1/jobs: what runs, what waits and what has ended, in pages."""

from typing import Literal

from starlette.responses import Response
from typing_extensions import TypedDict

from stoker.queue.listing import Place
from stoker.queue.records import Job, JobState
from stoker.runtime.gateway.endpoint import Endpoint, Incoming, Json
from stoker.runtime.gateway.errors import bad_request
from stoker.runtime.gateway.job_object import JobLinks, links, seconds
from stoker.runtime.gateway.job_routes import MOST_PER_PAGE, PAGE, is_own
from stoker.runtime.spec import short_name


class JobRow(TypedDict):
    """Times are unix seconds. The whole job, to its tenant alone, is behind `links`."""

    id: str
    object: Literal["job"]
    function: str
    tenant: str
    state: JobState
    attempt: int
    max_attempts: int
    enqueued_at: float
    started_at: float | None
    finished_at: float | None
    links: JobLinks


class JobRows(TypedDict):
    """`next` is the `after` of the next page, null at the end; a page may be short, or empty, and not the last one."""

    object: Literal["list"]
    data: list[JobRow]
    has_more: bool
    next: str | None


async def list_jobs(incoming: Incoming) -> Response:
    """The caller's own; the operator sees that others' are there."""
    limit, state = incoming.limit(PAGE, MOST_PER_PAGE), incoming.query("state")
    if state and state not in list(JobState):
        raise bad_request(f"'state' is one of {', '.join(JobState)}.", param="state")
    functions, tenant = await listed_functions(incoming), listed_tenant(incoming)
    page = await incoming.gateway.listing.page(functions, limit, place(incoming), tenant=tenant, state=state)
    rows = [job_row(job) for job in page.jobs if not incoming.caller.owner or is_own(incoming.caller, job)]
    following = str(page.next) if page.next else None
    answer: JobRows = {"object": "list", "data": rows, "has_more": following is not None, "next": following}
    return Json(answer)


async def listed_functions(incoming: Incoming) -> list[str]:
    registry, caller = incoming.gateway.registry, incoming.caller
    if name := incoming.query("function"):
        return [(await registry.find(caller, name)).name]
    if not caller.owner:
        return list(await registry.all())
    return [spec.name for spec in (await registry.visible(caller)).values()]


def listed_tenant(incoming: Incoming) -> str:
    """ "" for all of them. Raises ApiError 400 for a tenant who asks for another."""
    caller, wanted = incoming.caller, incoming.query("tenant")
    if not caller.owner:
        return wanted
    if wanted not in ("", caller.tenant):
        raise bad_request("Only the operator may list another tenant's jobs.", param="tenant")
    return caller.tenant


def place(incoming: Incoming) -> Place | None:
    text = incoming.query("after")
    try:
        return Place.of(text) if text else None
    except ValueError:
        raise bad_request("'after' is the 'next' of the page before.", param="after") from None


def job_row(job: Job) -> JobRow:
    return {
        "id": job.id,
        "object": "job",
        "function": short_name(job.function),
        "tenant": job.tenant,
        "state": job.state,
        "attempt": job.attempt,
        "max_attempts": job.max_attempts,
        "enqueued_at": job.enqueued_ms / 1000,
        "started_at": seconds(job.started_ms),
        "finished_at": seconds(job.finished_ms),
        "links": links(job.id),
    }


JOB_LIST_ENDPOINTS = [
    Endpoint(
        "GET",
        "/v1/jobs",
        list_jobs,
        "invoke",
        "Jobs: those that run, those that wait in their turn, and those that have ended, the latest end first.",
        "Jobs",
        answer=JobRows,
        problems={404: "There is no such function."},
        asks={
            "function": "Of this function only.",
            "state": "In this state only.",
            "tenant": "Of this tenant only; the operator's keys see all tenants.",
            "limit": f"At most so many, 1 to {MOST_PER_PAGE}; {PAGE} if left out.",
            "after": "Go on behind the page that had this `next`.",
        },
    )
]
