import asyncio

import pytest
from queue_oracle import Oracle
from redis.asyncio import Redis

from stoker.queue import keys
from stoker.queue.broker import Broker
from stoker.queue.records import Completion, Failure, JobState


async def expire_lease(client: Redis, job_id: str) -> None:
    assert await client.zadd(keys.key("f", "lease"), {job_id: 1}, xx=True, ch=True) == 1


async def test_nothing_to_do(broker: Broker, start) -> None:
    await start()
    assert await broker.tick("f") == 0
    assert await broker.tick("unknown") == 0


async def test_a_lost_worker_costs_one_attempt_and_the_job_its_place_not(
    broker: Broker, client: Redis, job, start, oracle: Oracle
) -> None:
    claim = await start(worker="gone")
    await broker.enqueue(job())
    await expire_lease(client, claim.job_id)
    assert await broker.tick("f") == 1
    assert oracle.check("f").jobs[claim.job_id]["state"] == "retrying"
    assert await broker.tick("f") == 0
    (again,) = await broker.claim("f", "w", 1)
    assert (again.job_id, again.attempt) == (claim.job_id, 2)


async def test_a_poison_job_ends_as_a_dead_letter(broker: Broker, client: Redis, start, oracle: Oracle) -> None:
    claim = await start(max_attempts=2, worker="w0")
    await expire_lease(client, claim.job_id)
    await broker.tick("f")
    await broker.claim("f", "w1", 1)
    await expire_lease(client, claim.job_id)
    assert await broker.tick("f") == 1
    job = await broker.job(claim.job_id)
    assert job is not None
    assert (job.state, job.attempt, job.reason) == (JobState.DEAD, 2, "lost its worker w1 in attempt 2 of 2")
    shot = oracle.check("f")
    assert shot.ttls[f"p:{claim.job_id}"] > 0
    assert await broker.claim("f", "w", 1) == []


@pytest.mark.parametrize("clock", ["start_within_ms", "finish_within_ms"])
async def test_a_job_that_waits_too_long_expires(broker: Broker, job, oracle: Oracle, clock: str) -> None:
    new, delayed = job(**{clock: 2}), job(**{clock: 2}, delay_ms=60_000)
    await broker.enqueue(new)
    await broker.enqueue(delayed)
    await asyncio.sleep(0.01)
    assert await broker.tick("f") == 2
    for job_id in (new.id, delayed.id):
        seen = await broker.job(job_id)
        assert seen is not None and seen.state is JobState.EXPIRED
        assert seen.reason == f"not {clock.split('_')[0]}ed within its limit of 0.002 s"
    oracle.check("f")


@pytest.mark.parametrize(
    ("clock", "reason"),
    [
        ("run_within_ms", "ran longer than its limit of 0.5 s"),
        ("finish_within_ms", "not finished within its limit of 0.5 s"),
    ],
)
async def test_a_job_that_runs_too_long_is_timed_out(
    broker: Broker, start, oracle: Oracle, clock: str, reason: str
) -> None:
    claim = await start(**{clock: 500})
    await asyncio.sleep(0.51)
    assert await broker.tick("f") == 1
    seen = await broker.job(claim.job_id)
    assert seen is not None and (seen.state, seen.reason) == (JobState.TIMED_OUT, reason)
    oracle.check("f")


async def test_the_start_clock_stops_with_the_first_claim(broker: Broker, start) -> None:
    claim = await start(start_within_ms=500)
    await asyncio.sleep(0.51)
    assert await broker.tick("f") == 0
    await broker.fail("f", [Failure(claim.job_id, claim.fence, b"", retry=True, counts=False)])
    assert await broker.tick("f") == 0


async def test_the_end_to_end_clock_runs_through_retries(broker: Broker, start, oracle: Oracle) -> None:
    claim = await start(finish_within_ms=500)
    await broker.fail("f", [Failure(claim.job_id, claim.fence, b"e", retry=True, counts=False)])
    await asyncio.sleep(0.51)
    assert await broker.tick("f") == 1
    seen = await broker.job(claim.job_id)
    assert seen is not None and seen.state is JobState.EXPIRED
    oracle.check("f")


async def test_a_ready_result_outlives_its_deadlines(broker: Broker, start) -> None:
    claim = await start(run_within_ms=500, finish_within_ms=500)
    await broker.done("f", [Completion(claim.job_id, claim.fence, b"r", b"u")])
    await asyncio.sleep(0.51)
    assert await broker.tick("f") == 0
    seen = await broker.job(claim.job_id)
    assert seen is not None and seen.result == b"r"


async def test_work_is_bounded(broker: Broker, client: Redis, job, oracle: Oracle) -> None:
    for _ in range(150):
        await broker.enqueue(job())
    for claim in await broker.claim("f", "w", 150):
        await expire_lease(client, claim.job_id)
    assert [await broker.tick("f") for _ in range(3)] == [100, 50, 0]
    oracle.check("f")


async def test_forgets_tenants_that_would_start_at_the_floor(broker: Broker, client: Redis, job) -> None:
    for i in range(40):
        await broker.enqueue(job(tenant=f"t{i}"))
    await broker.claim("f", "w", 40)
    for _ in range(3):
        await broker.enqueue(job(tenant="z", cost=5))
        await broker.claim("f", "w", 1)
    assert await client.hlen(keys.key("f", "v")) == 41  # type: ignore[misc]
    await broker.tick("f")
    assert await client.hkeys(keys.key("f", "v")) == [b"z"]  # type: ignore[misc]
