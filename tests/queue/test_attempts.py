"""A job's record tells what became of each of its attempts."""

import asyncio

from stoker.queue.broker import Broker
from stoker.queue.records import Completion, Failure, JobState


async def test_a_failed_a_lost_and_a_handed_back_attempt(broker: Broker, start) -> None:
    broker.lease_ms = 30
    claim = await start(worker="one")
    await broker.fail("f", [Failure(claim.job_id, claim.fence, b"broken", retry=True, usage=b"used")])
    await asyncio.sleep(0.01)
    (claim,) = await broker.claim("f", "two", 1)
    await asyncio.sleep(0.05)
    await broker.tick("f")
    (claim,) = await broker.claim("f", "three", 1)
    await broker.fail("f", [Failure(claim.job_id, claim.fence, b"", retry=True, counts=False)])
    (claim,) = await broker.claim("f", "four", 1)
    await broker.done("f", [Completion(claim.job_id, claim.fence, b"r", b"u")])
    job = await broker.job(claim.job_id)
    assert job is not None and job.state is JobState.SUCCEEDED and job.attempt == 3
    assert [(each.number, each.worker, each.how, each.usage, each.error) for each in job.past_attempts] == [
        (1, "one", "failed", b"used", b"broken"),
        (2, "two", "lost", None, None),
        (3, "three", "handed_back", None, None),
    ]
    times = [time for each in job.past_attempts for time in (each.began_ms, each.ended_ms)]
    assert times == sorted(times) and job.started_ms is not None and times[-1] <= job.started_ms


async def test_a_replayed_job_starts_with_none(broker: Broker, start) -> None:
    claim = await start(max_attempts=2)
    await broker.fail("f", [Failure(claim.job_id, claim.fence, b"e" * 5000, retry=True)])
    await asyncio.sleep(0.01)
    (claim,) = await broker.claim("f", "w", 1)
    await broker.fail("f", [Failure(claim.job_id, claim.fence, b"e", retry=True)])
    job = await broker.job(claim.job_id)
    assert job is not None and job.state is JobState.DEAD
    assert [(each.number, each.error) for each in job.past_attempts] == [(1, None)]
    await broker.replay(claim.job_id)
    job = await broker.job(claim.job_id)
    assert job is not None and list(job.past_attempts) == []
