"""Reading, cancelling and following jobs."""

import re
import secrets
import time

from starlette.responses import Response

from stoker.queue.records import Job, NotReplayable, function_of, made_at_ms
from stoker.runtime.gateway.calls import idempotency_key, own_id_key, replay
from stoker.runtime.gateway.endpoint import Incoming, Json
from stoker.runtime.gateway.errors import ApiError, bad_request, not_found, not_replayable
from stoker.runtime.gateway.event_stream import EventStream
from stoker.runtime.gateway.following import Following, job_expired
from stoker.runtime.gateway.job_events import LAST, event_frame, job_frames
from stoker.runtime.gateway.job_object import JobObject, JobPage, job_object
from stoker.runtime.gateway.stored_results import with_result
from stoker.runtime.gateway.waiting import WAITING
from stoker.runtime.spec import owner_of

PAGE, MOST_PER_PAGE = 20, 100
STREAM_ID = re.compile(r"\d{1,18}-\d{1,18}")


async def get_job(incoming: Incoming) -> Response:
    return Json(await described(incoming, await own_job(incoming)))


async def cancel_job(incoming: Incoming) -> Response:
    """The job as it is afterwards; one that had ended stays as it was."""
    job = await own_job(incoming)
    await incoming.gateway.broker.cancel(job.id)
    return Json(await described(incoming, await own_job(incoming)))


async def replay_job(incoming: Incoming) -> Response:
    """Queues a dead or failed job again; sent twice under one Idempotency-Key it does so once."""
    job, gateway = await own_job(incoming), incoming.gateway
    await gateway.registry.get(job.function)
    request = idempotency_key(incoming) or secrets.token_hex(8)
    try:
        replayed = await replay(gateway, incoming.caller.account, job, request)
    except NotReplayable as refusal:
        raise not_replayable(job.id, refusal.state) from None
    if replayed is None:
        raise job_not_found(job.id)
    gateway.background(gateway.cluster.ring())
    return Json(await described(incoming, await own_job(incoming)))


async def dead_jobs(incoming: Incoming) -> Response:
    """The caller's jobs of a function whose attempts are used up, the newest first."""
    spec = await incoming.gateway.registry.find(incoming.caller, incoming.path("name"))
    limit = incoming.limit(PAGE, MOST_PER_PAGE)
    after = incoming.query("after")
    jobs = await incoming.gateway.broker.dead_letters(spec.name, limit + 1, after, tenant=incoming.caller.tenant)
    rows = [job_object(job, "") for job in jobs[:limit]]
    page: JobPage = {"object": "list", "data": rows, "has_more": len(jobs) > limit}
    return Json(page)


async def job_events(incoming: Incoming) -> Response:
    """Everything the job says, from the start or after `Last-Event-ID`; 204 when the last event was seen already."""
    job = await own_job(incoming)
    after = incoming.headers.get("last-event-id", "")
    if after == LAST:
        return Response(status_code=204)
    if after and not STREAM_ID.fullmatch(after):
        raise bad_request("Last-Event-ID is not an id of this stream.", param="Last-Event-ID")
    following = Following(incoming.gateway, job.id, after or "0")
    frames = job_frames(following, await described(incoming, job))
    return EventStream(incoming.gateway, following, frames, event_frame)


async def own_job(incoming: Incoming) -> Job:
    """The caller's job of this path; another tenant's is as unknown as one that never was."""
    job_id = await job_id_of(incoming)
    try:
        function_of(job_id)
    except ValueError:
        raise job_not_found(job_id) from None
    job = await incoming.gateway.broker.job(job_id)
    if job is None:
        raise await job_gone(incoming, job_id)
    if job.tenant != incoming.caller.tenant:
        raise job_not_found(job_id)
    incoming.about_job(job_id)
    return job


async def job_id_of(incoming: Incoming) -> str:
    """Below a function, the path has the client's own id, under which it had put the job."""
    id = incoming.path("id")
    if "name" not in incoming.scope["path_params"]:
        return id
    spec = await incoming.gateway.registry.find(incoming.caller, incoming.path("name"))
    job_id = await incoming.gateway.broker.job_id_of(spec.name, incoming.caller.tenant, own_id_key(id))
    if job_id is None:
        raise job_not_found(id)
    return job_id


def job_not_found(job_id: str) -> ApiError:
    return not_found(f"There is no job '{job_id}'.", code="job_not_found", param="id")


async def job_gone(incoming: Incoming, job_id: str) -> ApiError:
    """410 for an id that was made longer ago than its function keeps results, else 404."""
    function = function_of(job_id)
    spec = (await incoming.gateway.registry.all()).get(function)
    if spec is None or owner_of(function) not in ("", incoming.caller.owner):
        return job_not_found(job_id)
    age_s = time.time() - made_at_ms(job_id) / 1000
    if age_s < spec.limits.retention_s:
        return job_not_found(job_id)
    return job_expired(job_id)


async def described(incoming: Incoming, job: Job) -> JobObject:
    if job.state not in WAITING:
        return job_object(await with_result(incoming.gateway, job), "")
    view = await incoming.gateway.view.snapshot()
    return job_object(job, view.why_waiting(job))
