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


async def refusal(admissions: Admission, tenant: Tenant, job_id: str, tokens: float, cost: int) -> Refused | None:
    return (await admissions.reserve(tenant, job_id, tokens, cost)).refused


def limited(**limits: float) -> Tenant:
    return replace(ACME, limits=TenantLimits(**limits))  # type: ignore[arg-type]


async def test_two_hundred_at_once_against_a_budget_of_ten(redis: Redis) -> None:
    tenant, admissions = limited(budget_usd=10), Admission(redis)
    answers = await asyncio.gather(*(refusal(admissions, tenant, f"job-{n}", 0, 1_000_000) for n in range(200)))
    refused = [answer for answer in answers if answer]
    assert len(answers) - len(refused) == 10
    assert {(answer.limit, answer.most) for answer in refused} == {("budget_usd", 10.0)}
    assert all(0 < answer.retry_after_s <= 31 * 86_400 for answer in refused)


async def test_what_was_spent_counts(redis: Redis) -> None:
    await redis.set(spent("acme", month_of(time.time())), 7_500_000, ex=60)
    tenant, admissions = limited(budget_usd=10), Admission(redis)
    answers = [await refusal(admissions, tenant, f"job-{n}", 0, 1_000_000) for n in range(4)]
    assert [answer is None for answer in answers] == [True, True, False, False]
    assert [answer.left for answer in answers if answer] == [0.5, 0.5]
    assert (await refusal(admissions, limited(budget_usd=5), "job", 0, 1) or Refused("", 0, 0, -1)).left == 0


async def test_a_refusal_changes_nothing(redis: Redis) -> None:
    tenant, admissions = limited(requests_per_minute=5, tokens_per_minute=100, concurrency=5), Admission(redis)
    assert await refusal(admissions, tenant, "a", 100, 0) is None
    before = {name: await redis.dump(name) async for name in redis.scan_iter()}
    refused = await refusal(admissions, tenant, "b", 10, 0)
    assert refused is not None and (refused.limit, refused.most) == ("tokens_per_minute", 100)
    assert 0 < refused.retry_after_s <= 6
    assert {name: await redis.dump(name) async for name in redis.scan_iter()} == before


async def test_a_raised_limit_helps_at_once_a_lowered_one_locks_nobody_out(redis: Redis) -> None:
    admissions = Admission(redis)
    assert await refusal(admissions, limited(tokens_per_minute=100), "a", 10_000, 0) is None
    refused = await refusal(admissions, limited(tokens_per_minute=100), "b", 1, 0)
    assert refused is not None and refused.retry_after_s > 90 * 60
    assert await refusal(admissions, limited(tokens_per_minute=100_000), "b", 1, 0) is None
    assert await refusal(admissions, limited(requests_per_minute=1000), "c", 0, 0) is None
    for number in range(20):
        await refusal(admissions, limited(requests_per_minute=1000), f"d{number}", 0, 0)
    lowered = await refusal(admissions, limited(requests_per_minute=1), "e", 0, 0)
    assert lowered is not None and lowered.retry_after_s <= 2


async def test_the_smallest_budget_is_one(redis: Redis) -> None:
    refused = await refusal(Admission(redis), limited(budget_usd=1e-9), "a", 0, 1_000_000)
    assert refused is not None and refused.limit == "budget_usd"


async def test_asked_again_it_takes_nothing_more(redis: Redis) -> None:
    tenant, admissions = limited(requests_per_minute=2), Admission(redis)
    for _ in range(5):
        assert await refusal(admissions, tenant, "same", 0, 0) is None
    assert await refusal(admissions, tenant, "second", 0, 0) is None
    assert (await refusal(admissions, tenant, "third", 0, 0) or Refused("", 0, 0)).limit == "requests_per_minute"


async def test_concurrency_is_free_again_when_a_job_has_ended_its_cost_when_it_is_settled(redis: Redis) -> None:
    tenant, admissions = limited(concurrency=1, budget_usd=2), Admission(redis)
    assert await refusal(admissions, tenant, "a", 0, 1_000_000) is None
    await admissions.keep("acme", "a")
    assert (await refusal(admissions, tenant, "b", 0, 1) or Refused("", 0, 0)).limit == "concurrency"
    await admissions.ended("acme", "a")
    assert (await refusal(admissions, tenant, "b", 0, 1_000_001) or Refused("", 0, 0)).limit == "budget_usd"
    await admissions.release("acme", "a")
    assert await refusal(admissions, tenant, "b", 0, 2_000_000) is None


async def test_a_reservation_that_nobody_keeps_ends_by_itself(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a crash between reserving and queueing."""
    monkeypatch.setattr(admission, "UNQUEUED_MS", 1000)
    tenant, admissions = limited(concurrency=2, budget_usd=1), Admission(redis)
    assert await refusal(admissions, tenant, "crashed", 0, 500_000) is None
    assert await refusal(admissions, tenant, "kept", 0, 500_000) is None
    await admissions.keep("acme", "kept")
    await asyncio.sleep(1.01)
    assert await refusal(admissions, tenant, "next", 0, 500_000) is None
    assert (await refusal(admissions, tenant, "more", 0, 0) or Refused("", 0, 0)).limit == "concurrency"


async def test_tenants_do_not_share_limits(redis: Redis) -> None:
    admissions, limits = Admission(redis), TenantLimits(requests_per_minute=1, concurrency=1, budget_usd=1)
    for name in ("ann", "bob"):
        assert await refusal(admissions, Tenant(name, limits=limits), "job", 0, 1_000_000) is None
    assert meta("ann") != meta("bob")


async def test_each_answer_tells_what_is_left(redis: Redis) -> None:
    admissions = Admission(redis)
    tenant = limited(requests_per_minute=60, tokens_per_minute=6000, concurrency=2)
    began = time.monotonic()
    first = await admissions.reserve(tenant, "a", 600, 0)
    assert [(rate.kind, rate.limit, rate.remaining) for rate in first.rates] == [
        ("requests", 60, 59),
        ("tokens", 6000, 5400),
    ]
    assert 0.9 < first.rates[0].reset_s <= 1 and 5.9 < first.rates[1].reset_s <= 6
    await admissions.reserve(tenant, "b", 600, 0)
    refused = await admissions.reserve(tenant, "c", 600, 0)
    assert refused.refused and refused.refused.limit == "concurrency"
    assert 4795 < refused.rates[1].remaining < 4805 + 100 * (time.monotonic() - began)
    assert (await admissions.reserve(limited(concurrency=5), "d", 1, 0)).rates == ()


async def test_an_early_place_takes_the_rest_later_and_once(redis: Redis) -> None:
    admissions = Admission(redis)
    tenant = limited(requests_per_minute=60, tokens_per_minute=6000, concurrency=1, budget_usd=2)
    for _ in range(2):
        early = await admissions.reserve(tenant, "a", 0, 100, early=True)
        assert early.refused is None and [rate.remaining // 59 for rate in early.rates] == [1, 101]
    assert (await refusal(admissions, tenant, "b", 0, 0) or Refused("", 0, 0)).limit == "concurrency"
    for _ in range(3):
        full = await admissions.reserve(tenant, "a", 600, 2_000_000)
        assert full.refused is None and [rate.remaining // 59 for rate in full.rates] == [1, 91]
    assert await redis.hgetall(f"{meta('acme')}:reserved") == {b"a": b"2000000"}
    assert not await redis.exists(f"{meta('acme')}:early")


async def test_an_early_place_whose_rest_is_refused_is_given_back(redis: Redis) -> None:
    tenant, admissions = limited(concurrency=1, budget_usd=1), Admission(redis)
    assert (await admissions.reserve(tenant, "a", 0, 400_000, early=True)).refused is None
    assert (await refusal(admissions, tenant, "a", 0, 1_000_001) or Refused("", 0, 0)).limit == "budget_usd"
    assert await refusal(admissions, tenant, "a", 0, 1_000_000) is None
    await admissions.release("acme", "a")
    assert (await admissions.reserve(tenant, "b", 0, 1, early=True)).refused is None
    await admissions.release("acme", "b")
    assert not [key async for key in redis.scan_iter(f"{meta('acme')}:*")]


async def test_an_early_place_that_took_too_long_is_taken_anew(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "UNQUEUED_MS", 1000)
    tenant, admissions = limited(requests_per_minute=60, concurrency=1), Admission(redis)
    await admissions.reserve(tenant, "a", 0, 0, early=True)
    await asyncio.sleep(1.01)
    assert await refusal(admissions, tenant, "b", 0, 0) is None
    assert (await refusal(admissions, tenant, "a", 5, 0) or Refused("", 0, 0)).limit == "concurrency"
