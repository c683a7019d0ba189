"""Small twin of `benchmarks.queue_memory`."""

import asyncio

from redis.asyncio import Redis

from stoker.queue import keys
from stoker.queue.broker import Broker
from stoker.queue.records import Completion

JOBS = 2_000
BYTES_PER_JOB = 2_500


async def used(client: Redis) -> int:
    return (await client.info("memory"))["used_memory_dataset"]


async def job_keys(client: Redis) -> list[str]:
    names = [name.decode() async for name in client.scan_iter(count=10_000)]
    return [name for name in names if not keys.is_permanent(name)]


async def test_a_queued_job_costs_its_payload_and_little_more_and_leaves_nothing(
    client: Redis, broker: Broker, job
) -> None:
    jobs = [job(payload=b"x" * 1024, retention_ms=1500, tenant=f"tenant-{n % 10}") for n in range(JOBS)]
    before = await used(client)
    for start in range(0, JOBS, 100):
        await asyncio.gather(*(broker.enqueue(new) for new in jobs[start : start + 100]))
    assert (await used(client) - before) / JOBS <= BYTES_PER_JOB
    while claims := await broker.claim("f", "w", 512):
        await broker.done("f", [Completion(claim.job_id, claim.fence, b"result", b"usage") for claim in claims])
    assert len(await job_keys(client)) >= 2 * JOBS
    async with asyncio.timeout(30):
        while await job_keys(client):
            await asyncio.sleep(0.1)
