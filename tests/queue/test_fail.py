import asyncio

import pytest
from queue_oracle import Oracle
from redis.asyncio import Redis

from stoker.queue import keys
from stoker.queue.broker import Broker
from stoker.queue.records import Claim, Completion, Failure, JobState, Settled


async def fail(broker: Broker, claim: Claim, **changes: object) -> Settled:
    values: dict[str, object] = {"error": b"error", "retry": True} | changes
    (answer,) = await broker.fail("f", [Failure(claim.job_id, claim.fence, **values)])  # type: ignore[arg-type]
    return answer


async def test_without_retry_it_is_over(broker: Broker, start, oracle: Oracle) -> None:
    claim = await start()
    assert await fail(broker, claim, retry=False, usage=b"u", notes=b"n") is Settled.DONE
    job = await broker.job(claim.job_id)
    assert job is not None
    assert (job.state, job.error, job.usage, job.notes) == (JobState.FAILED, b"error", b"u", b"n")
    (record,) = oracle.check("f").usage
    assert (record["state"], record["usage"]) == ("failed", "u")


async def test_retries_until_the_attempts_are_used_up(broker: Broker, client: Redis, start, oracle: Oracle) -> None:
    claim = await start(max_attempts=3)
    for attempt in (1, 2):
        assert claim.attempt == attempt
        assert await fail(broker, claim, error=b"error %d" % attempt) is Settled.RETRYING
        job = await broker.job(claim.job_id)
        assert job is not None and (job.state, job.error) == (JobState.RETRYING, b"error %d" % attempt)
        oracle.check("f")
        await asyncio.sleep(0.005)
        (claim,) = await broker.claim("f", "w", 1)
    assert await fail(broker, claim, error=b"last") is Settled.DEAD
    job = await broker.job(claim.job_id)
    assert job is not None and (job.state, job.error, job.attempt) == (JobState.DEAD, b"last", 3)
    assert job.reason == "failed in attempt 3 of 3"
    oracle.check("f")
    assert await client.get(keys.key("f", f"p:{claim.job_id}")) == b"payload"


async def test_replay_of_each_verdict(broker: Broker, start, oracle: Oracle) -> None:
    cases = [
        ({"retry": False}, Settled.DONE, 3),
        ({"retry": True}, Settled.RETRYING, 3),
        ({"retry": True}, Settled.DEAD, 1),
        ({"retry": True, "counts": False}, Settled.RETRYING, 1),
    ]
    for changes, expected, most in cases:
        claim = await start(max_attempts=most, tenant=f"t{most}")
        assert await fail(broker, claim, **changes) is expected
        before = oracle.check("f")
        assert await fail(broker, claim, **changes) is expected
        assert oracle.check("f") == before
        await broker.cancel(claim.job_id)


async def test_a_replay_after_the_next_claim_gets_the_first_answer(broker: Broker, start, oracle: Oracle) -> None:
    claim = await start()
    await fail(broker, claim, counts=False)
    (second,) = await broker.claim("f", "w2", 1)
    before = oracle.check("f")
    assert await fail(broker, claim, counts=False) is Settled.RETRYING
    assert oracle.check("f") == before
    assert await broker.done("f", [Completion(second.job_id, second.fence, b"", b"")]) == [Settled.DONE]


async def test_a_stale_fence_changes_nothing(broker: Broker, client: Redis, start, oracle: Oracle) -> None:
    old = await start()
    await client.zadd(keys.key("f", "lease"), {old.job_id: 1})
    await broker.tick("f")
    (new,) = await broker.claim("f", "w2", 1)
    before = oracle.check("f")
    for changes in ({}, {"retry": False}, {"counts": False}):
        assert await fail(broker, old, usage=b"stale", **changes) is Settled.STALE
    assert oracle.check("f") == before
    assert new.attempt == 2


async def test_hand_back_keeps_the_attempt_and_the_place(broker: Broker, job, start, oracle: Oracle) -> None:
    first = await start(max_attempts=1)
    others = [job() for _ in range(3)]
    for new in others:
        await broker.enqueue(new)
    (second,) = await broker.claim("f", "w", 1)
    for claim in (second, first):
        assert await fail(broker, claim, counts=False) is Settled.RETRYING
    oracle.check("f")
    claims = await broker.claim("f", "w", 10)
    assert [claim.job_id for claim in claims] == [first.job_id, *(new.id for new in others)]
    assert {claim.attempt for claim in claims} == {1}


async def test_hand_back_charges_nothing(broker: Broker, client: Redis, start) -> None:
    claim = await start(cost=7.0)
    assert float(await client.hget(keys.key("f", "v"), "a") or 0) == 7  # type: ignore[misc]
    await fail(broker, claim, counts=False)
    assert float(await client.hget(keys.key("f", "v"), "a") or 0) == 0  # type: ignore[misc]


async def test_endless_hand_backs_use_up_the_attempts(broker: Broker, start, oracle: Oracle) -> None:
    """A job that takes its engine down every time is handed back every time."""
    claim = await start(max_attempts=2)
    answers = []
    for _ in range(12):
        answers.append(await fail(broker, claim, counts=False))
        await asyncio.sleep(0.004)
        claims = await broker.claim("f", "w", 1)
        if not claims:
            break
        (claim,) = claims
    assert answers == [Settled.RETRYING] * 11 + [Settled.DEAD]
    oracle.check("f")


@pytest.mark.parametrize("attempt", [1, 4])
async def test_backoff_has_full_jitter(client: Redis, broker: Broker, job, attempt: int) -> None:
    slow = Broker(client, backoff_base_ms=10_000, backoff_cap_ms=50_000)
    ceiling = min(50_000, 10_000 * 2 ** (attempt - 1))
    jobs = [job(max_attempts=9) for _ in range(200)]
    for new in jobs:
        await slow.enqueue(new)
        await client.hset(keys.key("f", f"j:{new.id}"), "attempt", attempt - 1)  # type: ignore[misc]
    claims = await slow.claim("f", "w", 200)
    await slow.fail("f", [Failure(claim.job_id, claim.fence, b"", retry=True) for claim in claims])
    now_s, now_us = await client.time()
    due = await client.zrange(keys.key("f", "delay"), 0, -1, withscores=True)
    waits = [score - now_s * 1000 - now_us / 1000 for _, score in due]
    assert min(waits) < 0.1 * ceiling
    assert 0.9 * ceiling < max(waits) <= ceiling
    assert 0.4 * ceiling < sum(waits) / len(waits) < 0.6 * ceiling


async def test_the_execution_clock_starts_again_with_each_attempt(broker: Broker, start, oracle: Oracle) -> None:
    claim = await start(run_within_ms=500, start_within_ms=500)
    await fail(broker, claim)
    assert claim.job_id not in oracle.check("f").zsets["dl"]
    await asyncio.sleep(0.51)
    (second,) = await broker.claim("f", "w", 1)
    assert second.job_id == claim.job_id
    assert claim.job_id in oracle.check("f").zsets["dl"]
