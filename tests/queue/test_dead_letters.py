"""Jobs whose attempts are used up: listed, read, and queued again."""

from collections.abc import Awaitable, Callable

import pytest
import redis
from queue_oracle import Oracle, snapshot

from stoker.queue import keys
from stoker.queue.broker import Broker
from stoker.queue.records import (
    Claim,
    Completion,
    Emission,
    Failure,
    JobState,
    NewJob,
    NotReplayable,
    Settled,
    new_job_id,
)

Start = Callable[..., Awaitable[Claim]]
MakeJob = Callable[..., NewJob]


@pytest.fixture
def die(broker: Broker, start: Start) -> Start:
    """A job that used up its only attempt."""

    async def run(**changes: object) -> Claim:
        claim = await start(max_attempts=1, **changes)
        failure = Failure(claim.job_id, claim.fence, b"error", retry=True, usage=b"u")
        assert await broker.fail("f", [failure]) == [Settled.DEAD]
        return claim

    return run


async def test_the_newest_first_in_pages(broker: Broker, die: Start) -> None:
    assert await broker.dead_letters("f") == []
    ids = [(await die(tenant="ab"[i % 2])).job_id for i in range(5)][::-1]
    ids.sort(reverse=True)
    assert [job.id for job in await broker.dead_letters("f")] == ids
    assert [job.id for job in await broker.dead_letters("f", 2)] == ids[:2]
    assert [job.id for job in await broker.dead_letters("f", 2, ids[1])] == ids[2:4]
    assert await broker.dead_letters("f", 2, ids[4]) == await broker.dead_letters("g") == []
    assert {job.tenant for job in await broker.dead_letters("f", tenant="a")} == {"a"}
    assert len(await broker.dead_letters("f", tenant="a")) == 3


async def test_a_dead_letter_says_what_happened(broker: Broker, die: Start) -> None:
    claim = await die()
    (letter,) = await broker.dead_letters("f")
    assert letter == await broker.job(claim.job_id)
    assert (letter.state, letter.error, letter.reason) == (JobState.DEAD, b"error", "failed in attempt 1 of 1")


async def test_what_has_expired_is_not_listed_and_leaves(broker: Broker, die: Start, raw: redis.Redis) -> None:
    gone, kept = await die(), await die()
    raw.delete(keys.key("f", f"j:{gone.job_id}"))
    assert [job.id for job in await broker.dead_letters("f")] == [kept.job_id]
    more = await die()
    listed = raw.zrange(keys.key("f", "dead"), 0, -1)
    assert {name.decode() for name in listed} == {kept.job_id, more.job_id}


async def test_the_list_lasts_as_long_as_its_longest_letter(broker: Broker, die: Start, raw: redis.Redis) -> None:
    await die(retention_ms=500_000)
    await die(retention_ms=1_000)
    assert 400_000 < raw.pttl(keys.key("f", "dead")) <= 500_000


async def test_the_list_is_bounded(broker: Broker, die: Start, raw: redis.Redis) -> None:
    new = [new_job_id("f") for _ in range(10_050)]
    raw.zadd(keys.key("f", "dead"), dict.fromkeys(new, 0))
    await die()
    assert raw.zcard(keys.key("f", "dead")) == 10_000
    raw.zrem(keys.key("f", "dead"), *new)


@pytest.mark.parametrize("retry", [True, False])
async def test_a_replayed_job_starts_over(broker: Broker, start: Start, oracle: Oracle, job, retry: bool) -> None:
    first = await start(max_attempts=1, stream=True, finish_within_ms=600_000, idempotency_key="k", retention_ms=9_000)
    await broker.emit("f", [Emission(first.job_id, first.fence, 1, b"1")])
    await broker.fail("f", [Failure(first.job_id, first.fence, b"error", retry=retry, usage=b"u")])
    oracle.check("f")
    other = job()
    await broker.enqueue(other)
    assert await broker.replay(first.job_id) is JobState.QUEUED
    shot = oracle.check("f")
    assert first.job_id in shot.zsets["dl"]
    record = await broker.job(first.job_id)
    assert record is not None
    assert (record.state, record.attempt, record.finished_ms, record.reason) == (JobState.QUEUED, 0, None, "")
    assert await broker.dead_letters("f") == []
    assert [claim.job_id for claim in await broker.claim("f", "w", 1)] == [other.id]
    (again,) = await broker.claim("f", "w", 1)
    assert (again.job_id, again.attempt, again.payload) == (first.job_id, 1, first.payload)
    assert again.fence > first.fence
    assert [chunk.data for chunk in again.chunks] == [b"1"]
    verdict = Settled.DEAD if retry else Settled.DONE
    assert await broker.done("f", [Completion(first.job_id, first.fence, b"late", b"late")]) == [verdict]
    assert await broker.done("f", [Completion(again.job_id, again.fence, b"r", b"u")]) == [Settled.DONE]
    shot = oracle.check("f")
    assert (shot.jobs[first.job_id]["state"], shot.jobs[first.job_id]["replays"]) == ("succeeded", "1")
    assert 0 < shot.ttls[f"j:{first.job_id}"] <= 9_000


async def test_a_replay_can_die_and_be_replayed_again(broker: Broker, die: Start, oracle: Oracle) -> None:
    claim = await die()
    for _ in range(2):
        assert await broker.replay(claim.job_id) is JobState.QUEUED
        (again,) = await broker.claim("f", "w", 1)
        failure = Failure(again.job_id, again.fence, b"error", retry=True)
        assert await broker.fail("f", [failure]) == [Settled.DEAD]
        oracle.check("f")
    assert [job.id for job in await broker.dead_letters("f")] == [claim.job_id]


async def test_a_request_replays_once(broker: Broker, die: Start, lose_reply, raw: redis.Redis) -> None:
    claim = await die()
    await lose_reply(lambda: broker.replay(claim.job_id, "one"))
    executed = snapshot(raw, "f")
    assert await broker.replay(claim.job_id, "one") is JobState.QUEUED
    assert snapshot(raw, "f") == executed
    (again,) = await broker.claim("f", "w", 1)
    assert await broker.replay(claim.job_id, "one") is JobState.RUNNING
    await broker.fail("f", [Failure(again.job_id, again.fence, b"e", retry=True)])
    assert await broker.replay(claim.job_id, "one") is JobState.DEAD
    assert await broker.replay(claim.job_id, "two") is JobState.QUEUED


async def test_what_can_not_be_replayed(broker: Broker, start: Start, job: MakeJob, raw: redis.Redis) -> None:
    running, done, waiting = await start(), await start(), job()
    await broker.done("f", [Completion(done.job_id, done.fence, b"r", b"u")])
    await broker.enqueue(waiting)
    before = snapshot(raw, "f")
    for job_id, state in ((running.job_id, "running"), (done.job_id, "succeeded"), (waiting.id, "queued")):
        with pytest.raises(NotReplayable, match=f"is {state}; only a dead or a failed job") as refused:
            await broker.replay(job_id)
        assert refused.value.state == state
    assert await broker.replay(new_job_id("f")) is None
    assert snapshot(raw, "f") == before


async def test_a_replay_wakes_the_controller_of_a_forgotten_function(broker: Broker, die: Start) -> None:
    claim = await die()
    await broker.purge_function("f")
    assert await broker.replay(claim.job_id) is JobState.QUEUED
    assert await broker.functions_with_work() == ["f"]
