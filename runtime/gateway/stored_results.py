"""Results that are too big for the queue, read from the object store."""

import asyncio
from dataclasses import replace

from stoker.coldstart.failures import ColdStartError
from stoker.queue.events import Ending
from stoker.queue.records import Job
from stoker.runtime import payloads
from stoker.runtime.gateway.context import Gateway
from stoker.runtime.gateway.errors import store_unavailable


async def with_result(gateway: Gateway, job: Job) -> Job:
    """The job with its result, wherever that is. Raises ApiError 503."""
    if job.result is None or not payloads.is_reference(job.result):
        return job
    return replace(job, result=await stored(gateway, job.id, job.result))


async def end_with_result(gateway: Gateway, job_id: str, ending: Ending) -> Ending:
    """The same for what a job's last event says."""
    if ending.result is None or not payloads.is_reference(ending.result):
        return ending
    return ending._replace(result=await stored(gateway, job_id, ending.result))


async def stored(gateway: Gateway, job_id: str, reference: bytes) -> bytes:
    try:
        return await asyncio.to_thread(payloads.get_result, gateway.store, job_id, reference)
    except ColdStartError as error:
        raise store_unavailable(str(error)) from error
