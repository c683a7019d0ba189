import asyncio

import redis
from queue_oracle import Oracle

from stoker.queue.broker import Broker
from stoker.queue.records import Completion, Emission, Failure, JobState, Settled, new_job_id


async def test_a_waiting_job_is_cancelled_at_once(broker: Broker, job, start, oracle: Oracle) -> None:
    queued, delayed = job(batch_key="k"), job(delay_ms=60_000)
    retrying = await start(max_attempts=3)
    await broker.fail("f", [Failure(retrying.job_id, retrying.fence, b"e", retry=True, counts=False)])
    await broker.enqueue(queued)
    await broker.enqueue(delayed)
    for job_id in (queued.id, delayed.id, retrying.job_id):
        assert await broker.cancel(job_id, "not needed") is JobState.CANCELLED
        seen = await broker.job(job_id)
        assert seen is not None and (seen.state, seen.reason) == (JobState.CANCELLED, "not needed")
        shot = oracle.check("f")
    assert shot.lanes == {} and shot.waiting == {}
    assert await broker.claim("f", "w", 10) == []


async def test_a_running_job_is_taken_from_its_worker(broker: Broker, start, oracle: Oracle, raw: redis.Redis) -> None:
    channel = raw.pubsub(ignore_subscribe_messages=True)
    channel.subscribe("stoker:worker:w1")
    claim = await start(worker="w1", stream=True)
    assert await broker.cancel(claim.job_id) is JobState.CANCELLED
    while (message := channel.get_message(timeout=1)) is None:
        pass
    assert message["data"].decode() == f"{claim.job_id} cancelled"
    channel.close()
    assert await broker.emit("f", [Emission(claim.job_id, claim.fence, 1, b"x")]) == [claim.job_id]
    assert await broker.done("f", [Completion(claim.job_id, claim.fence, b"r", b"u")]) == [Settled.STALE]
    assert await broker.fail("f", [Failure(claim.job_id, claim.fence, b"e", retry=True)]) == [Settled.STALE]
    assert await broker.beat("f", "w1", {claim.job_id: claim.fence}) == {claim.job_id: "cancelled"}
    (record,) = oracle.check("f").usage
    assert (record["state"], record["usage"]) == ("cancelled", "")


async def test_a_replay_is_the_same_answer(broker: Broker, start, oracle: Oracle) -> None:
    claim = await start()
    assert await broker.cancel(claim.job_id, "first") is JobState.CANCELLED
    before = oracle.check("f")
    assert await broker.cancel(claim.job_id, "second") is JobState.CANCELLED
    assert oracle.check("f") == before


async def test_an_ended_job_stays_as_it_is(broker: Broker, start) -> None:
    claim = await start()
    await broker.fail("f", [Failure(claim.job_id, claim.fence, b"e", retry=False)])
    assert await broker.cancel(claim.job_id) is JobState.FAILED


async def test_an_unknown_job_is_none(broker: Broker) -> None:
    assert await broker.cancel(new_job_id("f")) is None


async def test_cancel_in_the_middle_of_a_long_lane(broker: Broker, job, oracle: Oracle) -> None:
    jobs = [job() for _ in range(50)]
    for new in jobs:
        await broker.enqueue(new)
    await asyncio.gather(*(broker.cancel(new.id) for new in jobs[::2]))
    oracle.check("f")
    assert [claim.job_id for claim in await broker.claim("f", "w", 50)] == [new.id for new in jobs[1::2]]
