import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import redis
from redis.asyncio import Redis

from stoker.queue import keys
from stoker.queue.broker import Broker
from stoker.queue.events import Bells
from stoker.queue.records import Failure


@pytest.fixture
async def cancelled() -> list[tuple[str, str]]:
    return []


@pytest.fixture
async def bells(server_url: str, broker: Broker, cancelled: list[tuple[str, str]]) -> AsyncIterator[Bells]:
    subject = Bells(server_url, "w", on_cancel=lambda job_id, why: cancelled.append((job_id, why)))
    await subject.start()
    while await subject.wait("f", 0.05):
        pass
    yield subject
    await subject.close()


async def test_the_first_wait_returns_at_once(server_url: str) -> None:
    subject = Bells(server_url, "w", on_cancel=print)
    await subject.start()
    assert await subject.wait("f", 0)
    await subject.close()


async def test_silence_times_out(bells: Bells) -> None:
    began = time.monotonic()
    assert not await bells.wait("f", 0.05)
    assert time.monotonic() - began >= 0.04


async def test_work_rings(bells: Bells, broker: Broker, job) -> None:
    waiting = asyncio.create_task(bells.wait("f", 5))
    await asyncio.sleep(0.01)
    await broker.enqueue(job(function="g"))
    assert not waiting.done()
    await broker.enqueue(job())
    assert await waiting
    assert not await bells.wait("f", 0.02)


async def test_a_ring_before_the_wait_is_not_lost(bells: Bells, broker: Broker, job) -> None:
    await broker.enqueue(job())
    # What was said before has come.
    await broker.enqueue(job(function="g"))
    assert await bells.wait("g", 5)
    assert await bells.wait("f", 0)


async def test_whatever_comes_back_into_a_lane_rings(bells: Bells, broker: Broker, client: Redis, job, start) -> None:
    claim = await start()
    assert await bells.wait("f", 5)
    await broker.fail("f", [Failure(claim.job_id, claim.fence, b"", retry=True, counts=False)])
    assert await bells.wait("f", 5)
    (claim,) = await broker.claim("f", "w", 1)
    await client.zadd(keys.key("f", "lease"), {claim.job_id: 1})
    await broker.tick("f")
    assert await bells.wait("f", 5)
    await broker.claim("f", "w", 1)
    await broker.enqueue(job(delay_ms=5))
    assert not await bells.wait("f", 0.02)
    await broker.tick("f")
    assert await bells.wait("f", 5)


async def test_a_claim_that_leaves_work_rings_for_the_others(bells: Bells, broker: Broker, job, enqueue_all) -> None:
    await enqueue_all([job() for _ in range(5)])
    assert await bells.wait("f", 5)
    await broker.claim("f", "w", 3)
    assert await bells.wait("f", 5)
    await broker.claim("f", "w", 3)
    assert not await bells.wait("f", 0.02)


async def test_a_reconnect_rings_for_what_may_have_been_missed(bells: Bells, raw: redis.Redis) -> None:
    assert not await bells.wait("f", 0.01)
    raw.client_kill_filter(_type="pubsub")
    assert await bells.wait("f", 5)


async def test_tells_which_running_jobs_are_over(
    bells: Bells, broker: Broker, start, cancelled: list[tuple[str, str]]
) -> None:
    mine, late, other = await start(), await start(run_within_ms=1), await start(worker="w2")
    await asyncio.sleep(0.005)
    await broker.cancel(other.job_id)
    await broker.cancel(mine.job_id)
    await broker.tick("f")
    async with asyncio.timeout(30):
        while len(cancelled) < 2:
            await asyncio.sleep(0.005)
    assert sorted(cancelled) == sorted([(mine.job_id, "cancelled"), (late.job_id, "timed_out")])
