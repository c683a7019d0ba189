"""A job that kills its worker each time ends after its attempts; the jobs beside it are done."""

import asyncio
import itertools
import signal

from stoker.queue.broker import Broker
from stoker.queue.embedded import EmbeddedValkey
from stoker.queue.records import JobState
from tests.faults.queue.conftest import MakeJob, Spawn
from tests.faults.queue.worker_process import POISON, work
from tests.queue.queue_oracle import Oracle

LEASE_MS = 300
ATTEMPTS = 3


async def test_a_poison_job_is_dead_with_its_reason(
    server: EmbeddedValkey, broker: Broker, oracle: Oracle, spawn: Spawn, job: MakeJob
) -> None:
    poison, good = job(payload=POISON, max_attempts=ATTEMPTS), [job(max_attempts=9) for _ in range(5)]
    for new in (poison, *good):
        await broker.enqueue(new)
    names = (f"w{life}" for life in itertools.count())
    worker = spawn(work, server.url, next(names), LEASE_MS)
    deaths = []
    async with asyncio.timeout(60):
        while (
            (await broker.backlogs(["f"]))["f"].queued or await broker.tick("f") or not await ended(broker, poison.id)
        ):
            if not worker.is_alive():
                deaths.append(worker.exitcode)
                worker = spawn(work, server.url, next(names), LEASE_MS)
            await asyncio.sleep(0.05)
        while not all([await ended(broker, new.id) for new in good]):
            await asyncio.sleep(0.05)
    record = await broker.job(poison.id)
    assert record is not None
    assert (record.state, record.attempt) == (JobState.DEAD, ATTEMPTS)
    assert record.reason.startswith("lost its worker w") and record.reason.endswith("in attempt 3 of 3")
    assert deaths == [-signal.SIGKILL] * len(deaths) and len(deaths) >= ATTEMPTS - 1
    shot = oracle.check("f")
    assert {shot.jobs[new.id]["state"] for new in good} == {"succeeded"}


async def ended(broker: Broker, job_id: str) -> bool:
    record = await broker.job(job_id)
    return record is not None and record.state.terminal
