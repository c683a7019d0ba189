"""Reading, cancelling and following jobs."""

import re
import secrets
from collections.abc import Callable
from functools import partial

from starlette.responses import Response

from stoker.queue.records import Job, NotReplayable, function_of, made_at_ms
from stoker.runtime.gateway.auth import Caller
from stoker.runtime.gateway.calling_jobs import why_waits
from stoker.runtime.gateway.calls import idempotency_key, own_id_key, replay
from stoker.runtime.gateway.endpoint import Incoming, Json
from stoker.runtime.gateway.errors import ApiError, bad_request, not_found, not_replayable
from stoker.runtime.gateway.event_stream import EventStream
from stoker.runtime.gateway.following import Following, job_expired
from stoker.runtime.gateway.job_cost import cost_of
from stoker.runtime.gateway.job_end import preferred_wait, until_ended
from stoker.runtime.gateway.job_events import LAST, event_frame, job_frames
from stoker.runtime.gateway.job_object import JobObject, JobPage, job_object
from stoker.runtime.gateway.large import aside
from stoker.runtime.gateway.media import answer_in, shown_in, wants_msgpack
from stoker.runtime.gateway.routing import targets_of
from stoker.runtime.gateway.stored_results import with_result
from stoker.runtime.gateway.waiting import WAITING
from stoker.runtime.payloads import size_of
from stoker.runtime.spec import FunctionSpec

PAGE, MOST_PER_PAGE = 20, 100
# What a job costs that didn't do its work.
NOTHING = 0.0
# Both halves are below 2^64.
May = Callable[[Caller, Job], bool]
STREAM_ID = re.compile(r"\d{1,18}-\d{1,18}", re.ASCII)


async def get_job(incoming: Incoming) -> Response:
    job = await readable_job(incoming)
    if (wait_s := preferred_wait(incoming)) and not job.state.terminal:
        await until_ended(incoming.gateway, job.id, wait_s)
        job = await job_for(incoming, job.id, may_read)
    return await record_in(incoming, job)


async def cancel_job(incoming: Incoming) -> Response:
    """The job as it is afterwards; one that had ended stays as it was."""
    job = await own_job(incoming)
    await incoming.gateway.broker.cancel(job.id)
    return await record_in(incoming, await own_job(incoming))


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
    return await record_in(incoming, await own_job(incoming))


async def dead_jobs(incoming: Incoming) -> Response:
    """The caller's jobs of a function whose attempts are used up, the newest first."""
    spec = await incoming.gateway.registry.find(incoming.caller, incoming.path("name"))
    limit = incoming.limit(PAGE, MOST_PER_PAGE)
    after = incoming.query("after")
    jobs = await incoming.gateway.broker.dead_letters(spec.name, limit + 1, after, tenant=incoming.caller.tenant)
    rows = [job_object(job, cost_usd=NOTHING) for job in jobs[:limit] if is_own(incoming.caller, job)]
    page: JobPage = {"object": "list", "data": rows, "has_more": len(jobs) > limit}
    return Json(page)


async def job_events(incoming: Incoming) -> Response:
    """Everything the job says, from the start or after `Last-Event-ID`; 204 when the last event was seen already."""
    job = await readable_job(incoming)
    after = incoming.headers.get("last-event-id", "")
    if after == LAST:
        return Response(status_code=204)
    if after and not STREAM_ID.fullmatch(after):
        raise bad_request("Last-Event-ID is not an id of this stream.", param="Last-Event-ID")
    following = Following(incoming.gateway, job.id, after or "0")
    show = shown_in(incoming.headers)
    frames = job_frames(following, await described(incoming, job), show)
    return EventStream(incoming.gateway, following, frames, partial(event_frame, show=show))


async def own_job(incoming: Incoming) -> Job:
    """The caller's job of this path."""
    return await job_of_path(incoming, is_own)


async def readable_job(incoming: Incoming) -> Job:
    """The job of this path, also another's for an operator."""
    return await job_of_path(incoming, may_read)


async def job_of_path(incoming: Incoming, may: May) -> Job:
    job = await job_for(incoming, await job_id_of(incoming), may)
    incoming.about_job(job.id)
    return job


async def own_job_of(incoming: Incoming, job_id: str) -> Job:
    return await job_for(incoming, job_id, is_own)


async def job_for(incoming: Incoming, job_id: str, may: May) -> Job:
    """One that the caller may not have is as unknown as one that never was."""
    try:
        function_of(job_id)
    except ValueError:
        raise job_not_found(job_id) from None
    job = await incoming.gateway.broker.job(job_id)
    if job is None:
        raise job_gone(incoming, job_id)
    if not may(incoming.caller, job):
        raise job_not_found(job_id)
    return job


async def job_id_of(incoming: Incoming) -> str:
    """Below a function, the path has the client's own id, under which it had put the job."""
    id = incoming.path("id")
    if "name" not in incoming.scope["path_params"]:
        return id
    spec = await incoming.gateway.registry.find(incoming.caller, incoming.path("name"))
    for name in await names_of(incoming, spec):
        job_id = await incoming.gateway.broker.job_id_of(name, incoming.caller.tenant, own_id_key(incoming, id))
        if job_id is not None:
            return job_id
    raise job_not_found(id)


async def names_of(incoming: Incoming, spec: FunctionSpec) -> list[str]:
    """Full names of the functions that a job put to this one may be in: a router's are with its targets."""
    if spec.router is None:
        return [spec.name]
    return [target.name for target in (await targets_of(incoming.gateway.registry, spec)).values()]


def is_own(caller: Caller, job: Job) -> bool:
    """Not the job of an earlier tenant with the same name."""
    return job.tenant == caller.tenant and is_made_by(caller, job.id)


def may_read(caller: Caller, job: Job) -> bool:
    return is_own(caller, job) or caller.reads_all


def is_made_by(caller: Caller, job_id: str) -> bool:
    return made_at_ms(job_id) >= int(caller.account.created_at * 1000)


def job_not_found(job_id: str) -> ApiError:
    return not_found(f"There is no job '{job_id}'.", code="job_not_found", param="id")


def job_gone(incoming: Incoming, job_id: str) -> ApiError:
    """410 for the id of a job of the caller's, else 404."""
    caller = incoming.caller
    own = incoming.gateway.job_ids.made_here(job_id, caller.tenant) and is_made_by(caller, job_id)
    return job_expired(job_id) if own else job_not_found(job_id)


async def record_in(incoming: Incoming, job: Job) -> Response:
    record, size = await described(incoming, job), size_of(job.result or b"")
    return await answer_in(incoming.headers, record, size)


async def described(incoming: Incoming, job: Job) -> JobObject:
    if job.state not in WAITING:
        whole, cost_usd = await with_result(incoming.gateway, job), await cost_of(incoming.gateway, job)
        make = partial(job_object, cost_usd=cost_usd, raw=wants_msgpack(incoming.headers))
        return await aside(len(whole.result or b""), make, whole)
    view = await incoming.gateway.view.snapshot()
    return job_object(job, await why_waits(incoming.gateway.broker, view, job), eta_s=view.eta_s(job))
