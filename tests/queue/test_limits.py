"""Limits on running jobs and on what comes per minute; those on queued jobs are in test_enqueue."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from queue_oracle import Oracle, snapshot

from stoker.queue import keys
from stoker.queue.broker import Broker
from stoker.queue.client import connect
from stoker.queue.events import Bells
from stoker.queue.records import Claim, Completion, Enqueued, Failure, JobState, Limits, NewJob, QueueFull

MakeJob = Callable[..., NewJob]
EnqueueAll = Callable[[list[NewJob]], Awaitable[None]]


async def finish(broker: Broker, claims: list[Claim]) -> None:
    await broker.done("f", [Completion(claim.job_id, claim.fence, b"r", b"u") for claim in claims])


def tenants(claims: list[Claim]) -> Counter[str]:
    return Counter(claim.tenant for claim in claims)


async def flood(server_url: str, jobs: list[NewJob], clients: int = 4) -> list[Enqueued | BaseException]:
    """All at once, over several connections."""
    connections = [connect(server_url) for _ in range(clients)]
    brokers = [Broker(connection) for connection in connections]
    calls = (brokers[i % clients].enqueue(new) for i, new in enumerate(jobs))
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for connection in connections:
        await connection.aclose()
    return answers


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        (Limits(max_queued=10), "max_queued"),
        (Limits(max_queued_per_tenant=10), "max_queued_per_tenant"),
        (Limits(requests_per_minute=10), "requests_per_minute"),
        (Limits(requests_per_minute_per_tenant=10), "requests_per_minute_per_tenant"),
        (Limits(cost_per_minute=20), "cost_per_minute"),
        (Limits(cost_per_minute_per_tenant=20), "cost_per_minute_per_tenant"),
    ],
)
async def test_of_200_at_once_exactly_10(
    broker: Broker, server_url: str, job: MakeJob, oracle: Oracle, limits: Limits, name: str
) -> None:
    await broker.set_limits("f", limits)
    answers = await flood(server_url, [job(cost=2) for _ in range(200)])
    refused = [answer for answer in answers if isinstance(answer, QueueFull)]
    assert sum(isinstance(answer, Enqueued) for answer in answers) == 10
    assert len(refused) == 190 and {full.limit for full in refused} == {name}
    assert len(oracle.check("f").jobs) == 10


async def test_a_tenant_at_its_running_limit_is_passed_over(
    broker: Broker, enqueue_all: EnqueueAll, job: MakeJob, oracle: Oracle
) -> None:
    await broker.set_limits("f", Limits(max_running_per_tenant=2))
    await enqueue_all([job(tenant="a", priority=i % 3) for i in range(9)] + [job(tenant="b") for _ in range(3)])
    first = await broker.claim("f", "w", 10)
    assert tenants(first) == {"a": 2, "b": 2}
    assert await broker.claim("f", "w2", 10) == []
    oracle.check("f")
    mine = [claim for claim in first if claim.tenant == "a"]
    await finish(broker, mine[:1])
    assert tenants(await broker.claim("f", "w", 10)) == {"a": 1}
    await broker.cancel(mine[1].job_id)
    assert tenants(await broker.claim("f", "w", 10)) == {"a": 1}
    await broker.set_limits("f", Limits())
    assert len(await broker.claim("f", "w", 10)) == 6
    oracle.check("f")


async def test_any_number_of_tenants_can_be_passed_over(
    broker: Broker, enqueue_all: EnqueueAll, job: MakeJob, oracle: Oracle
) -> None:
    """More than a claim looks at otherwise; the one that may run stands last."""
    await broker.set_limits("f", Limits(max_running_per_tenant=1))
    names = [f"t{i:03}" for i in range(200)]
    await enqueue_all([job(tenant=name) for name in names])
    assert len(await broker.claim("f", "w", 200)) == 200
    await enqueue_all([job(tenant=name) for name in names] + [job(tenant="late", cost=0)])
    assert [claim.tenant for claim in await broker.claim("f", "w", 10)] == ["late"]
    oracle.check("f")


async def test_a_function_has_a_running_limit(broker: Broker, enqueue_all: EnqueueAll, job: MakeJob) -> None:
    await broker.set_limits("f", Limits(max_running=3))
    await enqueue_all([job(tenant="ab"[i % 2]) for i in range(8)])
    first = await broker.claim("f", "w", 2)
    assert (len(first), len(await broker.claim("f", "w2", 8))) == (2, 1)
    assert await broker.claim("f", "w3", 8) == []
    await finish(broker, first)
    assert len(await broker.claim("f", "w", 8)) == 2


async def test_every_way_to_stop_running_makes_room(broker: Broker, raw: redis.Redis, job: MakeJob, start) -> None:
    await broker.set_limits("f", Limits(max_running_per_tenant=1))
    claim = await start()
    await broker.fail("f", [Failure(claim.job_id, claim.fence, b"e", retry=True, counts=False)])
    for act in ("retry", "lose", "time out", "fail"):
        (claim,) = await broker.claim("f", "w", 1)
        if act == "retry":
            await broker.fail("f", [Failure(claim.job_id, claim.fence, b"e", retry=True)])
            await asyncio.sleep(0.01)
        elif act == "lose":
            raw.zadd(keys.key("f", "lease"), {claim.job_id: 1})
            await broker.tick("f")
        elif act == "time out":
            await broker.enqueue(job())
            raw.zadd(keys.key("f", "dl"), {claim.job_id: 1})
            await broker.tick("f")
        else:
            await broker.fail("f", [Failure(claim.job_id, claim.fence, b"e", retry=False)])
    assert raw.hlen(keys.key("f", "tr")) == 0


async def test_room_rings_for_work_that_was_held_back(
    broker: Broker, server_url: str, enqueue_all: EnqueueAll, job: MakeJob
) -> None:
    await broker.set_limits("f", Limits(max_running_per_tenant=1))
    await enqueue_all([job() for _ in range(3)])
    claims = await broker.claim("f", "w", 1)
    bells = Bells(server_url, "w2", on_cancel=print)
    await bells.start()
    while await bells.wait("f", 0.1):
        assert await broker.claim("f", "w2", 1) == []
    await finish(broker, claims)
    assert await bells.wait("f", 5)
    (claim,) = await broker.claim("f", "w2", 1)
    while await bells.wait("f", 0.1):
        assert await broker.claim("f", "w3", 1) == []
    await broker.set_limits("f", Limits())
    assert await bells.wait("f", 5)
    await finish(broker, [claim])
    await bells.close()


async def test_a_bucket_refills_by_the_servers_clock(broker: Broker, job: MakeJob, oracle: Oracle) -> None:
    """120 a minute: one each 500 ms."""
    await broker.set_limits("f", Limits(requests_per_minute=120))
    sent = await asyncio.gather(*(broker.enqueue(job()) for _ in range(200)), return_exceptions=True)
    refused = [answer for answer in sent if isinstance(answer, QueueFull)]
    assert 60 <= len(refused) <= 80, "it holds 120, and refills while they are sent"
    assert "requests_per_minute: the limit of 120 is used up" in str(refused[-1])
    assert 0 < refused[-1].retry_after_s <= 0.5
    await asyncio.sleep(refused[-1].retry_after_s + 0.005)
    assert (await broker.enqueue(job())).created
    oracle.check("f")


async def test_a_refusal_costs_nothing_and_leaves_no_trace(broker: Broker, job: MakeJob, raw: redis.Redis) -> None:
    await broker.set_limits("f", Limits(requests_per_minute=1000, cost_per_minute_per_tenant=10))
    began = time.monotonic()
    await broker.enqueue(job(tenant="a", cost=8))
    before, buckets = snapshot(raw, "f"), {name: raw.get(keys.key("f", name)) for name in ("b:r", "b:c:a")}
    with pytest.raises(QueueFull) as refused:
        await broker.enqueue(job(tenant="a", cost=5))
    assert refused.value.limit == "cost_per_minute_per_tenant"
    assert 17.99 - (time.monotonic() - began) < refused.value.retry_after_s <= 18
    assert snapshot(raw, "f") == before
    assert buckets == {name: raw.get(keys.key("f", name)) for name in buckets}
    assert (await broker.enqueue(job(tenant="b", cost=5))).created
    assert (await broker.enqueue(job(tenant="a", cost=2))).created


async def test_asking_again_is_not_counted_again(broker: Broker, job: MakeJob) -> None:
    await broker.set_limits("f", Limits(requests_per_minute=1))
    new = job(idempotency_key="k")
    await broker.enqueue(new)
    assert (await broker.enqueue(new)).created
    assert (await broker.enqueue(job(idempotency_key="k"))).job_id == new.id
    with pytest.raises(QueueFull):
        await broker.enqueue(job())


async def test_a_job_larger_than_the_bucket_needs_a_full_one(broker: Broker, job: MakeJob, raw: redis.Redis) -> None:
    await broker.set_limits("f", Limits(cost_per_minute=10))
    began = time.monotonic()
    await broker.enqueue(job(cost=25))
    with pytest.raises(QueueFull) as refused:
        await broker.enqueue(job(cost=1))
    lasts_ms, passed = raw.pttl(keys.key("f", "b:c")), time.monotonic() - began
    assert 95.99 - passed < refused.value.retry_after_s <= 96
    assert 149_990 - 1000 * passed < lasts_ms <= 150_000


async def test_a_raised_limit_helps_at_once(broker: Broker, job: MakeJob) -> None:
    await broker.set_limits("f", Limits(cost_per_minute=1))
    await broker.enqueue(job(cost=100))
    with pytest.raises(QueueFull) as refused:
        await broker.enqueue(job(cost=1))
    assert refused.value.retry_after_s > 5_000
    await broker.set_limits("f", Limits(cost_per_minute=1000))
    assert (await broker.enqueue(job(cost=1))).created


async def test_buckets_leave_nothing(broker: Broker, job: MakeJob, raw: redis.Redis) -> None:
    await broker.set_limits("f", Limits(requests_per_minute=60_000, cost_per_minute_per_tenant=60_000))
    assert await broker.cancel((await broker.enqueue(job())).job_id) is JobState.CANCELLED
    await asyncio.sleep(0.02)
    assert not list(raw.scan_iter(match="*:b:*"))


@given(st.sampled_from(Limits.__slots__), st.sampled_from([-1, float("inf"), float("nan")]))
def test_impossible_limits_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Limits(**{name: value})
