"""Every end of a job with a webhook leaves one delivery, which stays until somebody has said that it is over."""

import asyncio
import time

from redis.asyncio import Redis

from stoker.queue import keys
from stoker.queue.broker import Broker, ClaimTicket
from stoker.queue.deliveries import Deliveries, Try
from stoker.queue.records import Completion, Failure, JobState

URL = "https://example.com/hook"


async def done(broker: Broker, claim) -> None:
    await broker.done("f", [Completion(claim.job_id, claim.fence, b"r", b"u")])


async def test_each_way_to_end_leaves_one(broker: Broker, client: Redis, job, start) -> None:
    deliveries, ends = Deliveries(client), {}
    claim = await start(webhook=URL)
    await done(broker, claim)
    await done(broker, claim)
    ends[claim.job_id] = JobState.SUCCEEDED
    claim = await start(webhook=URL)
    await broker.fail("f", [Failure(claim.job_id, claim.fence, b"e", retry=False)])
    ends[claim.job_id] = JobState.FAILED
    claim = await start(webhook=URL, max_attempts=1)
    await broker.fail("f", [Failure(claim.job_id, claim.fence, b"e", retry=True)])
    ends[claim.job_id] = JobState.DEAD
    claim = await start(webhook=URL)
    await broker.cancel(claim.job_id)
    ends[claim.job_id] = JobState.CANCELLED
    late = job(webhook=URL, start_within_ms=1)
    await broker.enqueue(late)
    slow = await start(webhook=URL, run_within_ms=1, priority=0)
    await asyncio.sleep(0.01)
    await broker.tick("f")
    ends |= {late.id: JobState.EXPIRED, slow.job_id: JobState.TIMED_OUT}
    quiet = await start()
    await done(broker, quiet)
    taken = await deliveries.take(["f", "unknown"], 100, 60_000)
    assert {each.job_id: each.state for each in taken} == ends
    assert {(each.url, each.tenant, each.status, each.tries) for each in taken} == {(URL, "a", "pending", 0)}
    assert await deliveries.take(["f"], 100, 60_000) == []


async def test_a_job_handed_over_to_a_standing_claim_has_its_webhook(broker: Broker, client: Redis, job) -> None:
    ticket = ClaimTicket()
    async with client.pubsub() as pubsub:
        await pubsub.subscribe("stoker:handover:w")
        await pubsub.get_message(timeout=1)
        assert await broker.claim_with(ticket, "f", "w", 1, stand_ms=5000) == []
        new = job(webhook=URL)
        assert (await broker.enqueue(new)).state is JobState.RUNNING
    (claim,) = await broker.claim_with(ticket, "f", "w", 1)
    await done(broker, claim)
    (taken,) = await Deliveries(client).take(["f"], 1, 1000)
    assert taken.id == f"{new.id}.0"


async def test_what_a_taker_leaves_comes_back_with_its_lease(broker: Broker, client: Redis, start) -> None:
    deliveries = Deliveries(client)
    await done(broker, await start(webhook=URL))
    (first,) = await deliveries.take(["f"], 1, 1000)
    assert await deliveries.take(["f"], 1, 500) == []
    await asyncio.sleep(1.01)
    (second,) = await deliveries.take(["f"], 1, 60_000)
    assert (second.id, second.url) == (first.id, first.url) and second.lease != first.lease
    what = Try(time.time(), 0.1, 200, "")
    assert not await deliveries.tried(first, what, "delivered", None, b"")
    ((seen, tries),) = await deliveries.of_job(first.job_id, 1)
    assert (seen.status, seen.tries, tries) == ("pending", 0, [what])
    assert await deliveries.tried(second, Try(time.time(), 0.2, 200, ""), "delivered", None, b"")
    ((seen, tries),) = await deliveries.of_job(first.job_id, 1)
    assert (seen.status, seen.tries, len(tries)) == ("delivered", 1, 2)
    assert await client.zcard(keys.key("f", "wd")) == 0


async def test_a_try_in_vain_is_repeated_with_what_was_said(broker: Broker, client: Redis, start) -> None:
    deliveries = Deliveries(client)
    await done(broker, await start(webhook=URL))
    (taken,) = await deliveries.take(["f"], 1, 60_000)
    assert await deliveries.tried(taken, Try(1.0, 0.1, 500, ""), "pending", 0.5, b"said")
    assert await deliveries.take(["f"], 1, 60_000) == []
    await asyncio.sleep(0.51)
    (taken,) = await deliveries.take(["f"], 1, 60_000)
    assert (taken.body, taken.tries) == (b"said", 1)
    assert await deliveries.tried(taken, Try(2.0, 0.1, 500, ""), "failed", None, b"said")
    await asyncio.sleep(0.01)
    assert await deliveries.take(["f"], 1, 60_000) == []
    assert await deliveries.again(taken.id)
    (taken,) = await deliveries.take(["f"], 1, 60_000)
    assert (taken.body, taken.tries, taken.status) == (b"said", 0, "pending")
    assert await deliveries.tried(taken, Try(3.0, 0.1, 200, ""), "delivered", None, b"")
    ((seen, tries),) = await deliveries.of_job(taken.job_id, 1)
    assert (seen.body, [each.status for each in tries]) == (b"", [500, 500, 200])
    assert not await deliveries.again("f-00000000000000000000000000.0")


async def test_each_of_a_jobs_lives_has_its_own(broker: Broker, client: Redis, start) -> None:
    deliveries = Deliveries(client)
    claim = await start(webhook=URL)
    await broker.fail("f", [Failure(claim.job_id, claim.fence, b"e", retry=False)])
    await broker.replay(claim.job_id)
    (claim,) = await broker.claim("f", "w", 1)
    await done(broker, claim)
    taken = await deliveries.take(["f"], 10, 60_000)
    assert [(each.id, each.state) for each in taken] == [
        (f"{claim.job_id}.0", JobState.FAILED),
        (f"{claim.job_id}.1", JobState.SUCCEEDED),
    ]
    assert [seen.id for seen, _ in await deliveries.of_job(claim.job_id, 2)] == [each.id for each in taken]


async def test_a_deleted_function_is_still_looked_at(broker: Broker, client: Redis, job) -> None:
    deliveries = Deliveries(client)
    await broker.enqueue(job(webhook=URL))
    assert await deliveries.functions() == ["f"]
    await broker.purge_function("f")
    assert await deliveries.functions() == ["f"]
    (taken,) = await deliveries.take(await deliveries.functions(), 10, 1000)
    assert taken.state is JobState.CANCELLED


async def test_every_key_ends_with_the_week(broker: Broker, client: Redis, start) -> None:
    deliveries = Deliveries(client)
    claim = await start(webhook=URL, retention_ms=50)
    await done(broker, claim)
    (taken,) = await deliveries.take(["f"], 1, 1000)
    await deliveries.tried(taken, Try(1.0, 0.1, 500, ""), "pending", 1, b"said")
    await asyncio.sleep(0.08)
    assert await broker.job(claim.job_id) is None
    week = keys.DELIVERY_KEPT_S * 1000
    for suffix in ("wd", f"w:{taken.id}", f"wl:{taken.id}"):
        assert week - 5000 < await client.pttl(keys.key("f", suffix)) <= week


async def test_listeners_hear_at_once_of_an_end_and_of_which_function(broker: Broker, client: Redis, start) -> None:
    claim = await start(webhook=URL)
    async with client.pubsub() as pubsub:
        await pubsub.subscribe(keys.DELIVERY_BELL)
        await pubsub.get_message(timeout=1)
        await done(broker, claim)
        message = await pubsub.get_message(timeout=1)
    assert message is not None and message["type"] == "message"
    assert keys.function_at(message["data"].decode()) == "f"
