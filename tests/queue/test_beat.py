import asyncio

from queue_oracle import Oracle
from redis.asyncio import Redis

from stoker.queue import keys
from stoker.queue.broker import Broker
from stoker.queue.listing import Listing
from stoker.queue.records import Completion, Failure, JobState


async def lease_end(client: Redis, job_id: str) -> float:
    end = await client.zscore(keys.key("f", "lease"), job_id)
    assert end is not None
    return float(end)


async def test_renews_what_is_held(broker: Broker, client: Redis, start) -> None:
    claims = [await start() for _ in range(3)]
    before = [await lease_end(client, claim.job_id) for claim in claims]
    await asyncio.sleep(0.01)
    assert await broker.beat("f", "w", {claim.job_id: claim.fence for claim in claims}) == {}
    after = [await lease_end(client, claim.job_id) for claim in claims]
    assert all(late > early for early, late in zip(before, after, strict=True))


async def test_says_what_is_lost_and_why(broker: Broker, client: Redis, start, oracle: Oracle) -> None:
    held, cancelled, over, ended, reaped = [await start(run_within_ms=60_000) for _ in range(5)]
    await broker.cancel(cancelled.job_id)
    await client.zadd(keys.key("f", "dl"), {over.job_id: 1})
    await broker.done("f", [Completion(ended.job_id, ended.fence, b"", b"")])
    await client.zadd(keys.key("f", "lease"), {reaped.job_id: 1})
    await broker.tick("f")
    unknown = {"f-01M8P9NXY7T1PMWEYN7D70NQY6": 5}
    fences = {claim.job_id: claim.fence for claim in (held, cancelled, over, ended, reaped)} | unknown
    expected = {
        cancelled.job_id: "cancelled",
        over.job_id: "timed_out",
        ended.job_id: "lost",
        reaped.job_id: "lost",
        **dict.fromkeys(unknown, "lost"),
    }
    assert await broker.beat("f", "w", fences) == expected
    assert await broker.beat("f", "w", fences) == expected
    oracle.check("f")


async def test_a_stale_fence_renews_nothing(broker: Broker, client: Redis, start) -> None:
    claim = await start()
    before = await lease_end(client, claim.job_id)
    await asyncio.sleep(0.01)
    assert await broker.beat("f", "w", {claim.job_id: claim.fence - 1}) == {claim.job_id: "lost"}
    assert await lease_end(client, claim.job_id) == before


async def test_a_beat_notices_an_execution_limit_without_a_tick(broker: Broker, start, oracle: Oracle) -> None:
    claim = await start(run_within_ms=1)
    await asyncio.sleep(0.01)
    assert await broker.beat("f", "w", {claim.job_id: claim.fence}) == {claim.job_id: "timed_out"}
    assert oracle.check("f").jobs[claim.job_id]["reason"] == "ran longer than its limit of 0.001 s"


async def test_an_expired_lease_that_nobody_reaped_is_still_held(broker: Broker, client: Redis, start) -> None:
    claim = await start()
    await client.zadd(keys.key("f", "lease"), {claim.job_id: 1})
    assert await broker.beat("f", "w", {claim.job_id: claim.fence}) == {}
    await broker.tick("f")
    assert await broker.beat("f", "w", {claim.job_id: claim.fence}) == {}


async def test_nothing_held_is_no_round_trip(broker: Broker) -> None:
    assert await broker.beat("f", "w", {}) == {}


async def test_a_kept_jobs_run_has_no_limit_but_the_whole_job_has(broker: Broker, client: Redis, start) -> None:
    run, whole, stale = (
        await start(run_within_ms=50),
        await start(run_within_ms=50, finish_within_ms=60_000),
        await start(),
    )
    held = {run.job_id: run.fence, whole.job_id: whole.fence, stale.job_id: stale.fence - 1}
    assert await broker.set_aside("f", held) == 2
    ((job_id, deadline),) = await client.zrange(keys.key("f", "dl"), 0, -1, withscores=True)
    assert job_id.decode() == whole.job_id and deadline == float(
        await client.hget(f"stoker:q:{{f}}:j:{whole.job_id}", "finish_by")
    )
    await asyncio.sleep(0.06)
    assert await broker.beat("f", "w", {run.job_id: run.fence, whole.job_id: whole.fence}) == {}


async def test_a_kept_job_is_queued_to_readers_until_it_is_claimed_again(
    broker: Broker, client: Redis, job, start, oracle: Oracle
) -> None:
    kept, runs = await start(idempotency_key="k"), await start()
    assert await broker.set_aside("f", {kept.job_id: kept.fence}) == 1
    assert await broker.set_aside("f", {runs.job_id: runs.fence - 1}) == 0
    shown = await broker.job(kept.job_id)
    assert shown and (shown.state, shown.aside, shown.started_ms) == (JobState.QUEUED, True, None)
    oracle.check("f")
    assert await counts(broker) == (1, 1)
    for again in (job(idempotency_key="k"), job(id=kept.job_id), job(id=runs.job_id)):
        answer = await broker.enqueue(again)
        wanted = JobState.RUNNING if again.id == runs.job_id else JobState.QUEUED
        assert (answer.job_id in (kept.job_id, runs.job_id), answer.state) == (True, wanted)
    listing = Listing(client)
    for state, id in ((JobState.QUEUED, kept.job_id), (JobState.RUNNING, runs.job_id), (JobState.RETRYING, "")):
        page = await listing.page(["f"], 10, state=state)
        assert [(each.id, each.state) for each in page.jobs] == ([(id, state)] if id else [])
    await broker.fail("f", [Failure(kept.job_id, kept.fence, b"e", retry=True, counts=False)])
    oracle.check("f")
    assert await counts(broker) == (1, 1)
    again = await broker.job(kept.job_id)
    assert again and (again.state, again.aside) == (JobState.RETRYING, False)
    (claim,) = await broker.claim("f", "other", 1)
    shown = await broker.job(kept.job_id)
    assert claim.job_id == kept.job_id and shown and (shown.state, shown.aside) == (JobState.RUNNING, False)
    oracle.check("f")
    assert await counts(broker) == (0, 2)


async def test_a_kept_job_that_ends_or_loses_its_worker_is_kept_no_more(
    broker: Broker, client: Redis, start, oracle: Oracle
) -> None:
    cancelled, lost, refused = [await start() for _ in range(3)]
    held = {claim.job_id: claim.fence for claim in (cancelled, lost, refused)}
    assert await broker.set_aside("f", held) == 3 and await counts(broker) == (3, 0)
    await broker.cancel(cancelled.job_id)
    await broker.fail("f", [Failure(refused.job_id, refused.fence, b"e", retry=False)])
    await client.zadd(keys.key("f", "lease"), {lost.job_id: 1})
    await broker.tick("f")
    oracle.check("f")
    assert await counts(broker) == (1, 0) and not await client.exists(keys.key("f", "aside"))


async def counts(broker: Broker) -> tuple[int, int]:
    backlog = (await broker.backlogs(["f"]))["f"]
    return backlog.queued, backlog.running
