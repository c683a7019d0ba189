"""The server is out of memory: new work is refused with a clear error; what was accepted is finished and makes room."""

import redis
from redis.exceptions import OutOfMemoryError

from stoker.queue.broker import Broker
from stoker.queue.records import Completion, JobState, NewJob, Settled
from tests.faults.queue.conftest import MakeJob
from tests.queue.queue_oracle import Oracle

MEGABYTE = 1 << 20


async def test_work_drains_and_is_accepted_again(
    raw: redis.Redis, broker: Broker, oracle: Oracle, job: MakeJob
) -> None:
    await broker.enqueue(job())
    raw.config_set("maxmemory", raw.info("memory")["used_memory"] + 20 * MEGABYTE)
    accepted, refused = await fill(broker, job)
    oracle.check("f")
    assert await broker.job(refused.id) is None
    while claims := await broker.claim("f", "w", 8):
        held = {claim.job_id: claim.fence for claim in claims}
        assert await broker.beat("f", "w", held) == {}
        completions = [Completion(job_id, fence, b"r", b"u") for job_id, fence in held.items()]
        assert await broker.done("f", completions) == [Settled.DONE] * len(claims)
    assert (await broker.enqueue(refused)).created
    assert await broker.cancel(refused.id) is JobState.CANCELLED
    shot = oracle.check("f")
    assert sum(row["state"] == "succeeded" for row in shot.jobs.values()) == accepted + 1


async def fill(broker: Broker, job: MakeJob) -> tuple[int, NewJob]:
    """Until the server refuses; how many it accepted, and what it refused."""
    for accepted in range(200):
        new = job(payload=b"x" * MEGABYTE)
        try:
            await broker.enqueue(new)
        except OutOfMemoryError as error:
            assert "maxmemory" in str(error)
            return accepted, new
    raise AssertionError("the server never filled up")
