"""Reading, cancelling and following jobs."""

import re
import time

from starlette.responses import Response

from stoker.queue.records import Job, function_of
from stoker.runtime.gateway.endpoint import Incoming, Json
from stoker.runtime.gateway.errors import ApiError, bad_request, not_found
from stoker.runtime.gateway.event_stream import EventStream
from stoker.runtime.gateway.following import job_expired
from stoker.runtime.gateway.job_events import LAST, job_frames
from stoker.runtime.gateway.job_object import JobObject, job_object, made_at_ms
from stoker.runtime.gateway.waiting import WAITING

STREAM_ID = re.compile(r"\d{1,18}-\d{1,18}")


async def get_job(incoming: Incoming) -> Response:
    return Json(await described(incoming, await own_job(incoming)))


async def cancel_job(incoming: Incoming) -> Response:
    """The job as it is afterwards; one that had ended stays as it was."""
    job = await own_job(incoming)
    await incoming.gateway.broker.cancel(job.id)
    return Json(await described(incoming, await own_job(incoming)))


async def job_events(incoming: Incoming) -> Response:
    """Everything the job says, from the start or after `Last-Event-ID`; 204 when the last event was seen already."""
    job = await own_job(incoming)
    after = incoming.headers.get("last-event-id", "")
    if after == LAST:
        return Response(status_code=204)
    if after and not STREAM_ID.fullmatch(after):
        raise bad_request("Last-Event-ID is not an id of this stream.", param="Last-Event-ID")
    gateway = incoming.gateway
    frames = job_frames(gateway, await described(incoming, job), after)
    return EventStream(frames, lambda: gateway.why_waiting(job.id), gateway.settings.keepalive_s)


async def own_job(incoming: Incoming) -> Job:
    """The caller's job of this path; another tenant's is as unknown as one that never was."""
    job_id = incoming.path("id")
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


def job_not_found(job_id: str) -> ApiError:
    return not_found(f"There is no job '{job_id}'.", code="job_not_found", param="id")


async def job_gone(incoming: Incoming, job_id: str) -> ApiError:
    """410 for an id that was made longer ago than its function keeps results, else 404."""
    functions = await incoming.gateway.registry.all()
    spec = functions.get(function_of(job_id))
    if spec is None:
        return job_not_found(job_id)
    age_s = time.time() - made_at_ms(job_id) / 1000
    if age_s < spec.limits.retention_s:
        return job_not_found(job_id)
    return job_expired(job_id)


async def described(incoming: Incoming, job: Job) -> JobObject:
    if job.state not in WAITING:
        return job_object(job, "")
    view = await incoming.gateway.view.snapshot()
    return job_object(job, view.why_waiting(job))
