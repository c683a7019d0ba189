import asyncio

import pytest
from queue_oracle import Oracle
from redis.asyncio import Redis

from stoker.queue import keys
from stoker.queue.broker import Broker
from stoker.queue.records import Completion, Failure, IdempotencyMismatch, JobState, Limits, NewJob, QueueFull


async def test_only_the_first_item_of_an_empty_backlog_wakes(broker: Broker, job, oracle: Oracle) -> None:
    answers = await asyncio.gather(*(broker.enqueue(job()) for _ in range(10)))
    assert [answer.wake for answer in answers].count(True) == 1
    assert sorted(answer.queued for answer in answers) == list(range(1, 11))
    assert {(answer.created, answer.state) for answer in answers} == {(True, JobState.QUEUED)}
    oracle.check("f")


async def test_the_backlog_is_empty_again_once_it_was_claimed(broker: Broker, job) -> None:
    assert (await broker.enqueue(job())).wake
    await broker.claim("f", "w", 1)
    assert (await broker.enqueue(job())).wake


async def test_replay_gets_the_same_answer(broker: Broker, job, oracle: Oracle) -> None:
    new = job(idempotency_key="k", request_digest=b"d")
    first = await broker.enqueue(new)
    assert await broker.enqueue(new) == first
    assert first.created and first.wake and first.queued == 1
    shot = oracle.check("f")
    assert len(shot.jobs) == 1


async def test_idempotency_key_leads_to_the_first_job(broker: Broker, job, start) -> None:
    claim = await start(idempotency_key="k", request_digest=b"d")
    again = await broker.enqueue(job(idempotency_key="k", request_digest=b"d"))
    assert (again.job_id, again.created, again.wake) == (claim.job_id, False, False)
    assert again.state is JobState.RUNNING
    await broker.done("f", [Completion(claim.job_id, claim.fence, b"r", b"u")])
    again = await broker.enqueue(job(idempotency_key="k", request_digest=b"d"))
    assert (again.job_id, again.state) == (claim.job_id, JobState.SUCCEEDED)


async def test_idempotency_key_of_another_request_is_refused(broker: Broker, job) -> None:
    digest = b"a:b\x00\n%d"
    first = job(idempotency_key="k", request_digest=digest)
    await broker.enqueue(first)
    with pytest.raises(IdempotencyMismatch, match=first.id):
        await broker.enqueue(job(idempotency_key="k", request_digest=digest + b"x"))
    assert not (await broker.enqueue(job(idempotency_key="k", request_digest=digest))).created


async def test_idempotency_keys_belong_to_a_tenant_and_a_function(broker: Broker, job) -> None:
    scopes = [("a", "f", "b:c"), ("a:b", "f", "c"), ("a", "g", "b:c"), ("b", "f", "b:c")]
    for tenant, function, key in scopes:
        assert (await broker.enqueue(job(tenant=tenant, function=function, idempotency_key=key))).created


async def test_idempotency_key_ends_with_its_job(broker: Broker, client: Redis, job, start) -> None:
    claim = await start(idempotency_key="k", retention_ms=1)
    await broker.done("f", [Completion(claim.job_id, claim.fence, b"", b"")])
    await asyncio.sleep(0.01)
    assert (await broker.enqueue(job(idempotency_key="k", request_digest=b"other"))).created


async def test_a_key_that_is_forgotten_makes_a_new_job(broker: Broker, job, start, oracle: Oracle) -> None:
    claim = await start(idempotency_key="k", request_digest=b"d")
    await broker.fail("f", [Failure(claim.job_id, claim.fence, b"e", retry=False)])
    other = job(idempotency_key="k", request_digest=b"d")
    await broker.forget_key(other.id, "a", "k")
    await broker.forget_key(claim.job_id, "b", "k")
    assert (await broker.enqueue(other)).job_id == claim.job_id
    await broker.forget_key(claim.job_id, "a", "k")
    assert (await broker.enqueue(other)).created
    # Who asks late, for the job before it, changes nothing.
    await broker.forget_key(claim.job_id, "a", "k")
    assert (await broker.enqueue(job(idempotency_key="k", request_digest=b"d"))).job_id == other.id
    before = await broker.job(claim.job_id)
    assert before and before.state is JobState.FAILED
    oracle.check("f")


async def test_full_queue_refuses_without_a_trace(broker: Broker, client: Redis, job, oracle: Oracle) -> None:
    await broker.set_limits("f", Limits(max_queued=3))
    for _ in range(2):
        await broker.enqueue(job())
    await broker.enqueue(job(delay_ms=60_000))
    before = await client.dbsize()
    with pytest.raises(QueueFull, match="3 jobs are waiting and the limit is 3") as refused:
        await broker.enqueue(job(idempotency_key="k"))
    assert refused.value.limit == "max_queued"
    assert refused.value.retry_after_s == 60
    assert await client.dbsize() == before
    oracle.check("f")


async def test_one_tenant_can_be_full(broker: Broker, job) -> None:
    await broker.set_limits("f", Limits(max_queued=0, max_queued_per_tenant=1))
    await broker.enqueue(job(tenant="a"))
    await broker.enqueue(job(tenant="b"))
    with pytest.raises(QueueFull) as refused:
        await broker.enqueue(job(tenant="a"))
    assert refused.value.limit == "max_queued_per_tenant"
    await broker.claim("f", "w", 2)
    await broker.enqueue(job(tenant="a"))


async def test_retry_after_follows_the_measured_drain_rate(broker: Broker, client: Redis, job, enqueue_all) -> None:
    """A twentieth of the limit (50 jobs), drained at about 12 per second over ten, which a pause hardly changes."""
    await broker.set_limits("f", Limits(max_queued=1000))
    await enqueue_all([job() for _ in range(100)])
    claims = await broker.claim("f", "w", 100)
    await broker.done("f", [Completion(claim.job_id, claim.fence, b"", b"") for claim in claims])
    await client.hincrby(keys.meta("f"), "drained:since", -10_000)  # type: ignore[misc]
    drained = (await broker.backlogs(["f"]))["f"].drained_per_s
    assert 8 < drained < 13
    await broker.set_limits("f", Limits(max_queued=1))
    await broker.enqueue(job())
    with pytest.raises(QueueFull) as refused:
        await broker.enqueue(job())
    assert refused.value.retry_after_s == 1
    await broker.set_limits("f", Limits(max_queued=1000))
    await enqueue_all([job() for _ in range(999)])
    with pytest.raises(QueueFull) as refused:
        await broker.enqueue(job())
    assert 3 < refused.value.retry_after_s < 9


async def refusal(broker: Broker, new: NewJob) -> float:
    with pytest.raises(QueueFull) as refused:
        await broker.enqueue(new)
    return refused.value.retry_after_s


async def test_retry_after_has_the_cold_start_in_it_while_no_worker_is_awake(
    broker: Broker, client: Redis, job, start
) -> None:
    """Of 100 jobs 5 drain in less than a second while a worker is awake; then none for long."""
    for claim in [await start() for _ in range(40)]:
        await broker.done("f", [Completion(claim.job_id, claim.fence, b"", b"")])
    await client.hincrby(keys.meta("f"), "drained:since", -2000)  # type: ignore[misc]
    await broker.set_limits("f", Limits(max_queued=100))
    for _ in range(100):
        await broker.enqueue(job())
    assert await refusal(broker, job()) == 1
    await broker.set_cold_start("f", 7000)
    assert await refusal(broker, job()) == 8
    for name in ("drained:at", "drained:since"):
        await client.hincrby(keys.meta("f"), name, -3_600_000)  # type: ignore[misc]
    assert await refusal(broker, job()) == 8
    await broker.claim("f", "w", 1)
    await broker.enqueue(job())
    assert await refusal(broker, job()) == 60


async def test_a_delayed_job_waits_for_its_time(broker: Broker, job, oracle: Oracle) -> None:
    new = job(delay_ms=1000)
    answer = await broker.enqueue(new)
    assert (answer.wake, answer.queued) == (False, 0)
    assert await broker.claim("f", "w", 1) == []
    backlog = (await broker.backlogs(["f"]))["f"]
    assert (backlog.queued, backlog.delayed) == (0, 1)
    oracle.check("f")
    await asyncio.sleep(1.01)
    assert [claim.job_id for claim in await broker.claim("f", "w", 1)] == [new.id]
    oracle.check("f")
