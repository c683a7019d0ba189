"""What an attempt had used when its job was stopped from outside."""

import asyncio

from queue_oracle import Oracle
from redis.asyncio import Redis

from stoker.queue import keys
from stoker.queue.broker import Broker
from stoker.queue.records import Completion, JobState, Metered


async def usage_records(client: Redis) -> list[dict[bytes, bytes]]:
    return [fields for _, fields in await client.xrange(keys.key("f", "use"))]


async def test_a_cancelled_attempts_usage_is_recorded_once(
    client: Redis, broker: Broker, start, oracle: Oracle
) -> None:
    claim = await start(retention_ms=60_000)
    used = Metered(claim.job_id, claim.fence, b"used")
    assert await broker.meter("f", [used]) == 0
    await broker.cancel(claim.job_id)
    assert [await broker.meter("f", [used]), await broker.meter("f", [used])] == [1, 0]
    first, late = await usage_records(client)
    assert (first[b"usage"], late[b"usage"], late[b"state"]) == (b"", b"used", b"cancelled")
    assert (late[b"job"], late[b"tenant"], late[b"held_ms"]) == (claim.job_id.encode(), b"a", b"0")
    job = await broker.job(claim.job_id)
    assert job and (job.state, job.usage) == (JobState.CANCELLED, b"used")
    assert 0 < await client.pttl(keys.key("f", f"o:{claim.job_id}")) <= 60_000
    oracle.check("f")


async def test_a_timed_out_attempts_usage_is_recorded(broker: Broker, start) -> None:
    claim = await start(run_within_ms=20)
    await asyncio.sleep(0.04)
    await broker.tick("f")
    assert await broker.meter("f", [Metered(claim.job_id, claim.fence, b"u")]) == 1


async def test_who_does_not_hold_the_last_fence_has_nothing_to_say(client: Redis, broker: Broker, start, job) -> None:
    done, stopped = await start(), await start()
    await broker.done("f", [Completion(done.job_id, done.fence, b"r", b"own")])
    await broker.cancel(stopped.job_id)
    stale = Metered(stopped.job_id, stopped.fence - 1, b"u")
    ended = Metered(done.job_id, done.fence, b"u")
    assert await broker.meter("f", [stale, ended, Metered(job().id, 1, b"u")]) == 0
    assert len(await usage_records(client)) == 2
