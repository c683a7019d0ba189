import asyncio

from queue_oracle import Oracle
from redis.asyncio import Redis

from stoker.queue import keys
from stoker.queue.broker import Broker, ClaimTicket
from stoker.queue.records import Claim, Completion, Emission, Failure, NewJob


async def enqueue_in_order(broker: Broker, jobs: list[NewJob]) -> list[str]:
    for new in jobs:
        await broker.enqueue(new)
    return [new.id for new in jobs]


def ids(claims: list[Claim]) -> list[str]:
    return [claim.job_id for claim in claims]


async def test_a_claim_carries_the_job(broker: Broker, job) -> None:
    new = job(payload=b"\x00\xff", max_attempts=5, stream=True, run_within_ms=60_000)
    await broker.enqueue(new)
    (claim,) = await broker.claim("f", "w", 8)
    assert (claim.job_id, claim.function, claim.tenant, claim.payload) == (new.id, "f", "a", b"\x00\xff")
    assert (claim.attempt, claim.max_attempts, claim.stream, claim.gateway) == (1, 5, True, "gw")
    assert (claim.run_within_ms, claim.chunks) == (60_000, [])
    assert 0 <= claim.claimed_ms - claim.since_ms < 5_000
    state = await broker.job(new.id)
    assert state is not None and (state.worker, state.started_ms) == ("w", claim.claimed_ms)


async def test_first_come_first_served_within_a_lane(broker: Broker, job) -> None:
    order = await enqueue_in_order(broker, [job() for _ in range(7)])
    served = [claim for size in (3, 1, 8) for claim in await broker.claim("f", "w", size)]
    assert ids(served) == order
    fences = [claim.fence for claim in served]
    assert fences == sorted(set(fences))
    assert await broker.claim("f", "w", 8) == []


async def test_urgent_before_normal_before_batch(broker: Broker, job) -> None:
    order = await enqueue_in_order(broker, [job(priority=priority) for priority in (2, 1, 0)])
    assert ids(await broker.claim("f", "w", 8)) == order[::-1]


async def test_batch_work_is_not_starved_by_urgent_work(broker: Broker, job) -> None:
    """Every ninth job, at the latest, comes from a priority that waits."""
    await enqueue_in_order(broker, [job(priority=0) for _ in range(100)])
    normal = set(await enqueue_in_order(broker, [job(priority=1) for _ in range(5)]))
    batch = set(await enqueue_in_order(broker, [job(priority=2) for _ in range(5)]))
    served = [job_id for size in [1] * 20 + [16] * 3 for job_id in ids(await broker.claim("f", "w", size))]
    for waiting in (normal, batch):
        positions = [i for i, job_id in enumerate(served) if job_id in waiting]
        gaps = [after - before for before, after in zip([-1, *positions], positions, strict=False)]
        assert len(positions) == 5
        assert max(gaps) <= 10 and min(gaps) >= 8


async def test_tenants_may_be_passed_over(broker: Broker, job) -> None:
    flood = await enqueue_in_order(broker, [job(tenant="flood") for _ in range(3)])
    calm = await enqueue_in_order(broker, [job(tenant="calm"), job(tenant="calm", priority=2)])
    ticket = ClaimTicket()
    assert ids(await broker.claim_with(ticket, "f", "w", 4, but={"flood"})) == calm
    assert ids(await broker.claim_with(ticket, "f", "w", 4, but={"flood", "calm"})) == []
    assert ids(await broker.claim_with(ticket, "f", "w", 4)) == flood


async def test_jobs_of_the_lowest_priority_may_be_counted_apart(broker: Broker, job) -> None:
    """Of each kind as many as there is room for: a batch job is left where it is rather than take another's place."""
    await enqueue_in_order(broker, [job(priority=priority) for priority in (2, 2, 2, 2, 2, 1, 0, 1)])

    async def claimed(limit: int, lowest: int) -> list[int]:
        return [claim.priority for claim in await broker.claim_with(ClaimTicket(), "f", "w", limit, 0, lowest)]

    assert await claimed(2, 1) == [0, 1, 2]
    assert await claimed(0, 1) == [2]
    assert await claimed(4, 0) == [1]
    assert await claimed(4, 0) == []
    assert await claimed(1, -1) == [2]
    assert await claimed(0, 9) == [2, 2]


async def test_a_batch_has_one_key_and_starts_with_the_fair_head(broker: Broker, job) -> None:
    small = await enqueue_in_order(broker, [job(tenant="a", batch_key="small") for _ in range(2)])
    large = await enqueue_in_order(broker, [job(tenant="a", batch_key="large") for _ in range(2)])
    other = await enqueue_in_order(broker, [job(tenant="b", batch_key="large") for _ in range(2)])
    assert ids(await broker.claim("f", "w", 8)) == small
    served = ids(await broker.claim("f", "w", 8))
    assert served[0] == other[0]
    assert sorted(served) == sorted(large + other)


async def test_a_batch_is_filled_from_other_priorities(broker: Broker, job) -> None:
    plain = [job(priority=2, batch_key="k"), job(priority=1, batch_key="x"), job(priority=0, batch_key="k")]
    order = await enqueue_in_order(broker, plain)
    assert ids(await broker.claim("f", "w", 8)) == [order[2], order[0]]
    assert ids(await broker.claim("f", "w", 8)) == [order[1]]


async def test_a_lost_reply_is_answered_again(broker: Broker, job, lose_reply, oracle: Oracle) -> None:
    await enqueue_in_order(broker, [job() for _ in range(5)])
    lost = await lose_reply(lambda: broker.claim("f", "w", 3))
    again = await broker.claim("f", "w", 3)
    assert [(claim.job_id, claim.fence) for claim in again] == [(row[0].decode(), row[3]) for row in lost]
    oracle.check("f")
    assert len(await broker.claim("f", "w", 3)) == 2


async def test_a_lost_reply_is_answered_without_what_was_taken_away_since(
    broker: Broker, job, lose_reply, oracle: Oracle
) -> None:
    first, second = await enqueue_in_order(broker, [job() for _ in range(2)])
    await lose_reply(lambda: broker.claim("f", "w", 2))
    await broker.cancel(first)
    assert ids(await broker.claim("f", "w", 2)) == [second]
    oracle.check("f")


async def test_workers_do_not_share_answers(broker: Broker, job, lose_reply) -> None:
    order = await enqueue_in_order(broker, [job() for _ in range(2)])
    await lose_reply(lambda: broker.claim("f", "w1", 1))
    assert ids(await broker.claim("f", "w2", 1)) == order[1:]
    assert ids(await broker.claim("f", "w1", 1)) == order[:1]


async def test_concurrent_claims_of_one_worker_are_different_claims(broker: Broker, job) -> None:
    await enqueue_in_order(broker, [job() for _ in range(20)])
    answers = await asyncio.gather(*(broker.claim("f", "w", 2) for _ in range(10)))
    served = [job_id for claims in answers for job_id in ids(claims)]
    assert len(served) == len(set(served)) == 20


async def test_an_overdue_job_is_never_handed_out(broker: Broker, job, oracle: Oracle) -> None:
    """Not even when more are overdue than one claim clears away."""
    late = await enqueue_in_order(broker, [job(start_within_ms=1) for _ in range(150)])
    fresh = await enqueue_in_order(broker, [job() for _ in range(2)])
    await asyncio.sleep(0.01)
    served: list[str] = []
    for _ in range(4):
        served += ids(await broker.claim("f", "w", 2))
    assert served == fresh
    shot = oracle.check("f")
    assert {shot.jobs[job_id]["state"] for job_id in late} == {"expired"}


async def test_a_later_attempt_gets_what_the_earlier_ones_emitted(broker: Broker, start) -> None:
    claim = await start(stream=True)
    await broker.emit("f", [Emission(claim.job_id, claim.fence, seq, b"%d" % seq) for seq in (1, 2)])
    await broker.fail("f", [Failure(claim.job_id, claim.fence, b"", retry=True, counts=False)])
    (second,) = await broker.claim("f", "w", 1)
    assert [(chunk.fence, chunk.attempt, chunk.data) for chunk in second.chunks] == [
        (claim.fence, 1, b"1"),
        (claim.fence, 1, b"2"),
    ]
    await broker.emit("f", [Emission(claim.job_id, second.fence, 1, b"3")])
    await broker.fail("f", [Failure(claim.job_id, second.fence, b"", retry=True, counts=False)])
    (third,) = await broker.claim("f", "w", 1)
    assert [chunk.data for chunk in third.chunks] == [b"1", b"2", b"3"]
    assert [chunk.fence for chunk in third.chunks] == [claim.fence, claim.fence, second.fence]


async def test_fences_stay_above_the_clock(broker: Broker, client: Redis, start) -> None:
    """A server that lost its last writes doesn't repeat a fence."""
    before = await start()
    await client.hset(keys.meta("f"), "fence", 5)  # type: ignore[misc]
    after = await start()
    assert after.fence > before.fence > 1_700_000_000_000_000


async def test_limits_below_one_claim_nothing(broker: Broker, job) -> None:
    await broker.enqueue(job())
    assert await broker.claim("f", "w", 0) == []


async def test_a_claim_is_capped(broker: Broker, job, enqueue_all) -> None:
    await enqueue_all([job() for _ in range(600)])
    claims = await broker.claim("f", "w", 100_000)
    assert len(claims) == 512
    assert len(await broker.claim("f", "w", 100_000)) == 88
    await broker.done("f", [Completion(claim.job_id, claim.fence, b"", b"") for claim in claims])
