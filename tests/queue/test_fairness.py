"""Start-time fair queueing over tenants: the shares, and the order against a plain reference."""

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from stoker.queue import keys
from stoker.queue.broker import Broker
from stoker.queue.records import Claim, Completion, Emission, Failure

TOLERANCE = 0.05


async def serve(broker: Broker, count: int, limit: int, costs: dict[str, float] | None = None) -> list[Claim]:
    """Claims `count` jobs, `limit` at a time, and finishes them (at the tenant's actual cost)."""
    served: list[Claim] = []
    while len(served) < count:
        claims = await broker.claim("f", "w", min(limit, count - len(served)))
        assert claims
        served += claims
        actual = [(costs or {}).get(claim.tenant) for claim in claims]
        await broker.done(
            "f",
            [
                Completion(item.job_id, item.fence, b"", b"", cost=cost)
                for item, cost in zip(claims, actual, strict=True)
            ],
        )
    return served


def assert_share(served: list[Claim], tenant: str, share: float) -> None:
    got = Counter(claim.tenant for claim in served)[tenant] / len(served)
    assert abs(got - share) <= TOLERANCE * share, f"{tenant} got {got:.3f} of the jobs, not {share:.3f}"


@pytest.mark.parametrize(("limit", "flood"), [(1, 500), (16, 5000)])
async def test_late_jobs_are_served_one_to_one_beside_a_flood(
    broker: Broker, job, enqueue_all, limit: int, flood: int
) -> None:
    await enqueue_all([job(tenant="flood") for _ in range(flood)])
    await serve(broker, 200, 64)
    await enqueue_all([job(tenant="late") for _ in range(100)])
    assert_share(await serve(broker, 200, limit), "late", 0.5)


async def test_shares_follow_the_weights(broker: Broker, job, enqueue_all) -> None:
    weights = {"heavy": 3, "light": 1}
    await enqueue_all([job(tenant=name, weight=weight) for _ in range(400) for name, weight in weights.items()])
    assert_share(await serve(broker, 400, 8), "heavy", 0.75)


async def test_the_weight_of_the_last_job_holds_for_all(broker: Broker, job, enqueue_all) -> None:
    await enqueue_all([job(tenant=name, weight=5) for _ in range(200) for name in ("changed", "same")])
    await enqueue_all([job(tenant="changed", weight=1)])
    assert_share(await serve(broker, 120, 4), "changed", 1 / 6)


async def test_expensive_jobs_are_served_less_often(broker: Broker, job, enqueue_all) -> None:
    costs = {"dear": 10.0, "cheap": 1.0}
    await enqueue_all([job(tenant=tenant, cost=cost) for _ in range(300) for tenant, cost in costs.items()])
    assert_share(await serve(broker, 220, 4), "dear", 1 / 11)


async def test_the_actual_cost_counts_not_the_estimate(broker: Broker, job, enqueue_all) -> None:
    costs = {"liar": 10.0, "honest": 1.0}
    await enqueue_all([job(tenant=tenant, cost=1) for _ in range(300) for tenant in costs])
    assert_share(await serve(broker, 220, 1, costs), "liar", 1 / 11)


async def test_a_long_job_counts_while_it_runs(broker: Broker, job, enqueue_all) -> None:
    """One tenant's job runs on and on, at 1 per claim of the others: its other jobs wait until it is paid for."""
    await enqueue_all([job(tenant=tenant) for _ in range(300) for tenant in ("long", "other")])
    running = next(claim for claim in await broker.claim("f", "w", 2) if claim.tenant == "long")
    served: list[Claim] = []
    for seq in range(1, 101):
        await broker.emit("f", [Emission(running.job_id, running.fence, seq, b"x", cost=1.0 + seq / 2)])
        served += await serve(broker, 1, 1)
    assert_share(served, "long", 0.25)


async def virtual_time(client: Redis) -> float:
    return float(await client.hget(keys.key("f", "v"), "a") or 0)  # type: ignore[misc]


async def test_what_exceeds_the_estimate_is_charged_once(broker: Broker, client: Redis, start, lose_reply) -> None:
    claim = await start(cost=10, stream=True, weight=2)
    assert await virtual_time(client) == 5

    async def emit(seq: int, cost: float, data: bytes = b"x") -> None:
        assert await broker.emit("f", [Emission(claim.job_id, claim.fence, seq, data, cost)]) == []

    await emit(1, 8)
    assert await virtual_time(client) == 5
    await lose_reply(lambda: emit(2, 30))
    await emit(2, 30)
    assert await virtual_time(client) == 15
    await emit(3, 20)
    await emit(4, 0)
    assert await virtual_time(client) == 15
    await emit(5, 40, b"")
    assert await virtual_time(client) == 20
    assert [chunk.data for chunk in await broker.chunks(claim.job_id)] == [b"x"] * 4
    await broker.done("f", [Completion(claim.job_id, claim.fence, b"", b"", cost=34)])
    assert await virtual_time(client) == 17


async def test_a_job_that_is_handed_back_gets_back_what_it_was_charged(broker: Broker, client: Redis, start) -> None:
    claim = await start(cost=10)
    await broker.emit("f", [Emission(claim.job_id, claim.fence, 1, b"x", cost=30)])
    assert await virtual_time(client) == 30
    await broker.fail("f", [Failure(claim.job_id, claim.fence, b"", retry=True, counts=False)])
    assert await virtual_time(client) == 0
    (again,) = await broker.claim("f", "w", 1)
    assert await virtual_time(client) == 10
    await broker.emit("f", [Emission(again.job_id, again.fence, 1, b"x", cost=12)])
    assert await virtual_time(client) == 12


async def test_a_stale_fence_charges_nothing(broker: Broker, client: Redis, start) -> None:
    claim = await start(cost=10)
    assert await broker.emit("f", [Emission(claim.job_id, claim.fence - 1, 1, b"x", cost=99)]) == [claim.job_id]
    assert await virtual_time(client) == 10


async def test_an_idle_tenant_banks_no_credit(broker: Broker, job, enqueue_all) -> None:
    await enqueue_all([job(tenant="idle"), *(job(tenant="busy") for _ in range(1000))])
    await serve(broker, 500, 16)
    await enqueue_all([job(tenant="idle") for _ in range(100)])
    assert_share(await serve(broker, 40, 1), "idle", 0.5)


async def test_leaving_and_coming_back_forgives_nothing(broker: Broker, job, enqueue_all) -> None:
    await enqueue_all([job(tenant="greedy", cost=50), *(job(tenant="other") for _ in range(200))])
    await serve(broker, 2, 2)
    await enqueue_all([job(tenant="greedy") for _ in range(100)])
    assert {claim.tenant for claim in await serve(broker, 45, 5)} == {"other"}


async def test_a_function_has_its_own_shares(broker: Broker, job, start) -> None:
    for _ in range(5):
        await start(function="f", tenant="a", cost=100)
    await broker.enqueue(job(function="g", tenant="b"))
    await broker.enqueue(job(function="g", tenant="a"))
    assert [claim.tenant for claim in await broker.claim("g", "w", 2)] == ["a", "b"]


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_impossible_weights_are_refused(job, weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        job(weight=weight)


@dataclass
class ReferenceQueue:
    """Start-time fair queueing, written for reading."""

    weights: dict[str, float]
    virtual: dict[str, float] = field(default_factory=dict)
    floor: float = 0.0
    waiting: dict[str, deque[tuple[str, float]]] = field(default_factory=dict)

    def enqueue(self, tenant: str, job_id: str, cost: float) -> None:
        queue = self.waiting.setdefault(tenant, deque())
        if not queue:
            self.virtual[tenant] = max(self.virtual.get(tenant, 0.0), self.floor)
        queue.append((job_id, cost))

    def claim(self) -> str | None:
        ready = [tenant for tenant, queue in self.waiting.items() if queue]
        if not ready:
            return None
        tenant = min(ready, key=lambda name: (self.virtual[name], name))
        job_id, cost = self.waiting[tenant].popleft()
        self.floor = max(self.floor, self.virtual[tenant])
        self.virtual[tenant] += cost / self.weights[tenant]
        return job_id

    def settle(self, tenant: str, difference: float) -> None:
        self.virtual[tenant] += difference / self.weights[tenant]


TENANTS = ("a", "b", "c")
COSTS = st.sampled_from([0.0, 0.1, 1.0, 2.5, 40.0])
STEPS = st.lists(
    st.tuples(st.just("enqueue"), st.sampled_from(TENANTS), COSTS)
    | st.tuples(st.just("claim"), st.integers(1, 5), st.none() | COSTS),
    max_size=40,
)


async def test_the_order_is_that_of_the_reference(broker: Broker, client: Redis, job, raw) -> None:
    loop = asyncio.get_running_loop()

    @settings(max_examples=40, deadline=None)
    @given(STEPS, st.tuples(*[st.sampled_from([0.5, 1.0, 3.0])] * 3))
    def run(steps: list[tuple], weights: tuple[float, ...]) -> None:
        # Not behind it: what a failure leaves would make the next example fail.
        raw.flushall()
        asyncio.run_coroutine_threadsafe(
            compare(broker, job, steps, dict(zip(TENANTS, weights, strict=True))), loop
        ).result()

    await asyncio.to_thread(run)


async def compare(broker: Broker, job, steps: list[tuple], weights: dict[str, float]) -> None:
    reference = ReferenceQueue(weights)
    for kind, first, second in steps:
        if kind == "enqueue":
            new = job(tenant=first, cost=second, weight=weights[first])
            reference.enqueue(first, new.id, second)
            await broker.enqueue(new)
            continue
        claims = await broker.claim("f", "w", first)
        assert [claim.job_id for claim in claims] == [found for _ in range(first) if (found := reference.claim())]
        if second is not None and claims:
            last = claims[-1]
            estimate = await broker._redis.hget(keys.key("f", f"j:{last.job_id}"), "cost")  # type: ignore[misc]
            reference.settle(last.tenant, second - float(estimate or 1))
            await broker.done("f", [Completion(last.job_id, last.fence, b"", b"", cost=second)])
