import asyncio
import time
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from stoker.runtime.tenancy import admission
from stoker.runtime.tenancy.admission import Admission, Refused, meta, spent
from stoker.runtime.tenancy.billing_days import month_of
from stoker.runtime.tenancy.tenant import Tenant, TenantLimits

ACME = Tenant("acme")


def limited(**limits: float) -> Tenant:
    return replace(ACME, limits=TenantLimits(**limits))  # type: ignore[arg-type]


async def test_two_hundred_at_once_against_a_budget_of_ten(redis: Redis) -> None:
    tenant, admissions = limited(budget_usd=10), Admission(redis)
    answers = await asyncio.gather(*(admissions.reserve(tenant, f"job-{n}", 0, 1_000_000) for n in range(200)))
    refused = [answer for answer in answers if answer]
    assert len(answers) - len(refused) == 10
    assert {(answer.limit, answer.most) for answer in refused} == {("budget_usd", 10.0)}
    assert all(0 < answer.retry_after_s <= 31 * 86_400 for answer in refused)


async def test_what_was_spent_counts(redis: Redis) -> None:
    await redis.set(spent("acme", month_of(time.time())), 7_500_000, ex=60)
    tenant, admissions = limited(budget_usd=10), Admission(redis)
    answers = [await admissions.reserve(tenant, f"job-{n}", 0, 1_000_000) for n in range(4)]
    assert [answer is None for answer in answers] == [True, True, False, False]


async def test_a_refusal_changes_nothing(redis: Redis) -> None:
    tenant, admissions = limited(requests_per_minute=5, tokens_per_minute=100, concurrency=5), Admission(redis)
    assert await admissions.reserve(tenant, "a", 100, 0) is None
    before = {name: await redis.dump(name) async for name in redis.scan_iter()}
    refused = await admissions.reserve(tenant, "b", 10, 0)
    assert refused is not None and (refused.limit, refused.most) == ("tokens_per_minute", 100)
    assert 0 < refused.retry_after_s <= 6
    assert {name: await redis.dump(name) async for name in redis.scan_iter()} == before


async def test_a_raised_limit_helps_at_once_a_lowered_one_locks_nobody_out(redis: Redis) -> None:
    admissions = Admission(redis)
    assert await admissions.reserve(limited(tokens_per_minute=100), "a", 10_000, 0) is None
    refused = await admissions.reserve(limited(tokens_per_minute=100), "b", 1, 0)
    assert refused is not None and refused.retry_after_s > 90 * 60
    assert await admissions.reserve(limited(tokens_per_minute=100_000), "b", 1, 0) is None
    assert await admissions.reserve(limited(requests_per_minute=1000), "c", 0, 0) is None
    for number in range(20):
        await admissions.reserve(limited(requests_per_minute=1000), f"d{number}", 0, 0)
    lowered = await admissions.reserve(limited(requests_per_minute=1), "e", 0, 0)
    assert lowered is not None and lowered.retry_after_s <= 2


async def test_the_smallest_budget_is_one(redis: Redis) -> None:
    refused = await Admission(redis).reserve(limited(budget_usd=1e-9), "a", 0, 1_000_000)
    assert refused is not None and refused.limit == "budget_usd"


async def test_asked_again_it_takes_nothing_more(redis: Redis) -> None:
    tenant, admissions = limited(requests_per_minute=2), Admission(redis)
    for _ in range(5):
        assert await admissions.reserve(tenant, "same", 0, 0) is None
    assert await admissions.reserve(tenant, "second", 0, 0) is None
    assert (await admissions.reserve(tenant, "third", 0, 0) or Refused("", 0, 0)).limit == "requests_per_minute"


async def test_concurrency_is_free_again_when_a_job_has_ended_its_cost_when_it_is_settled(redis: Redis) -> None:
    tenant, admissions = limited(concurrency=1, budget_usd=2), Admission(redis)
    assert await admissions.reserve(tenant, "a", 0, 1_000_000) is None
    await admissions.keep("acme", "a")
    assert (await admissions.reserve(tenant, "b", 0, 1) or Refused("", 0, 0)).limit == "concurrency"
    await admissions.ended("acme", "a")
    assert (await admissions.reserve(tenant, "b", 0, 1_000_001) or Refused("", 0, 0)).limit == "budget_usd"
    await admissions.release("acme", "a")
    assert await admissions.reserve(tenant, "b", 0, 2_000_000) is None


async def test_a_reservation_that_nobody_keeps_ends_by_itself(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a crash between reserving and queueing."""
    monkeypatch.setattr(admission, "UNQUEUED_MS", 40)
    tenant, admissions = limited(concurrency=2, budget_usd=1), Admission(redis)
    assert await admissions.reserve(tenant, "crashed", 0, 500_000) is None
    assert await admissions.reserve(tenant, "kept", 0, 500_000) is None
    await admissions.keep("acme", "kept")
    await asyncio.sleep(0.06)
    assert await admissions.reserve(tenant, "next", 0, 500_000) is None
    assert (await admissions.reserve(tenant, "more", 0, 0) or Refused("", 0, 0)).limit == "concurrency"


async def test_tenants_do_not_share_limits(redis: Redis) -> None:
    admissions, limits = Admission(redis), TenantLimits(requests_per_minute=1, concurrency=1, budget_usd=1)
    for name in ("ann", "bob"):
        assert await admissions.reserve(Tenant(name, limits=limits), "job", 0, 1_000_000) is None
    assert meta("ann") != meta("bob")
