"""Deletes big payloads and results from the object store once no job needs them."""

import asyncio
import time

from stoker.coldstart.store import ObjectStore
from stoker.queue.broker import Broker
from stoker.queue.records import Job, JobState, made_at_ms
from stoker.runtime.payloads import PREFIX, RESULTS, job_of

# A payload is written before its job is queued: an id that the queue doesn't know may still come.
GRACE_S = 3600.0


def needed(key: str, job: Job | None, age_s: float) -> bool:
    """A payload: by a job (None: the queue doesn't know it) that may still be run, now or after a replay. A result: by
    a job whose record is there."""
    if key.startswith(RESULTS):
        return job is not None
    if job is None:
        return age_s < GRACE_S
    return not job.state.terminal or job.state in (JobState.DEAD, JobState.FAILED)


async def sweep(store: ObjectStore, broker: Broker) -> int:
    """How many were deleted. Raises ColdStartError or RedisError."""
    return await sweep_folder(store, broker, PREFIX) + await sweep_folder(store, broker, RESULTS)


async def sweep_folder(store: ObjectStore, broker: Broker, folder: str) -> int:
    deleted = 0
    for key in await asyncio.to_thread(lambda: [found.key for found in store.list(folder)]):
        job_id = job_of(key)
        if job_id is None:
            continue
        job = await broker.job(job_id)
        if not needed(key, job, time.time() - made_at_ms(job_id) / 1000):
            await asyncio.to_thread(store.delete, key)
            deleted += 1
    return deleted
