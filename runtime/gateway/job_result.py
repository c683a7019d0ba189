"""A job's result alone, without its record."""

import asyncio
from functools import partial
from typing import Any

from starlette.responses import RedirectResponse, Response

from stoker.coldstart.failures import ColdStartError
from stoker.queue.records import Job
from stoker.runtime import payloads
from stoker.runtime.gateway.endpoint import Endpoint, Incoming
from stoker.runtime.gateway.errors import NO_RETRY, ApiError, store_unavailable
from stoker.runtime.gateway.job_object import shown_result
from stoker.runtime.gateway.job_routes import readable_job
from stoker.runtime.gateway.large import aside
from stoker.runtime.gateway.media import answer_in, wants_msgpack
from stoker.runtime.gateway.outcome import outcome_of_job
from stoker.runtime.gateway.stored_results import with_result


async def get_result(incoming: Incoming) -> Response:
    """As msgpack, a big one comes from the object store itself: the answer is a redirect to a signed URL, where the
    store is a bucket. A job that failed is answered with its error."""
    job = await readable_job(incoming)
    if not job.state.terminal:
        message = f"Job '{job.id}' is {job.state}; it has no result yet."
        raise ApiError(409, message, code="job_not_finished", param="id", headers=NO_RETRY)
    raw = wants_msgpack(incoming.headers)
    if raw and (url := await signed_url(incoming, job)):
        return RedirectResponse(url, status_code=303)
    whole = await with_result(incoming.gateway, job)
    size = len(whole.result or b"")
    result = (await aside(size, outcome_of_job, whole)).value()
    return await answer_in(incoming.headers, await aside(size, partial(shown_result, raw=raw), result), size)


async def signed_url(incoming: Incoming, job: Job) -> str:
    """Raises ApiError 503."""
    if job.result is None:
        return ""
    try:
        return await asyncio.to_thread(payloads.value_url, incoming.gateway.store, job.id, job.result)
    except ColdStartError as error:
        raise store_unavailable(str(error)) from error


RESULT_ENDPOINTS = [
    Endpoint(
        "GET",
        "/v1/jobs/{id}/result",
        get_result,
        "invoke",
        "A job's result alone; as msgpack, a big one is read at the signed URL that the answer redirects to.",
        "Jobs",
        answer=Any,
        others={303: None},
        problems={
            404: "There is no such job.",
            409: "The job has not ended.",
            410: "The job's result is no longer kept.",
            422: "The input didn't fit the function.",
            499: "The job was cancelled.",
            504: "A time limit passed.",
        },
        reads={"Accept": "application/msgpack gives bytes and arrays as they are."},
        packs=True,
    ),
]
