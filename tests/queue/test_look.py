"""What readers see: job records, backlogs, the functions with work; and the end of a function."""

import asyncio
import time

from queue_oracle import Oracle
from redis.asyncio import Redis

from stoker.queue import keys
from stoker.queue.broker import Broker
from stoker.queue.records import Completion, Failure, JobState, Limits, new_job_id


async def test_an_unknown_job_is_none(broker: Broker) -> None:
    assert await broker.job(new_job_id("f")) is None


async def test_a_record_ends_with_its_retention(broker: Broker, client: Redis, start) -> None:
    claim = await start(retention_ms=500, stream=True, idempotency_key="k")
    await broker.done("f", [Completion(claim.job_id, claim.fence, b"r", b"u")])
    assert await broker.job(claim.job_id) is not None
    await asyncio.sleep(0.51)
    assert await broker.job(claim.job_id) is None
    left = {key.decode().rpartition("}:")[2].partition(":")[0] for key in await client.keys("stoker:q:*")}
    assert left == {"m", "v", "use", "c"}


async def test_jobs_ahead_count_in_turns(broker: Broker, job, enqueue_all) -> None:
    await enqueue_all([job(tenant="flood") for _ in range(500)])
    late = [job(tenant="late") for _ in range(3)]
    await enqueue_all(late)
    ahead = [record.queued_ahead for new in late if (record := await broker.job(new.id))]
    assert ahead == [1, 3, 5]
    first = job(function="g")
    await broker.enqueue(first)
    record = await broker.job(first.id)
    assert record is not None and record.queued_ahead == 0


async def test_a_backlog_counts_every_place(broker: Broker, client: Redis, job, start) -> None:
    began = time.monotonic()
    await start()
    await asyncio.sleep(0.02)
    for _ in range(3):
        await broker.enqueue(job())
    await broker.enqueue(job(delay_ms=60_000))
    claims = await broker.claim("f", "w", 1)
    await broker.done("f", [Completion(claims[0].job_id, claims[0].fence, b"", b"")])
    await client.hincrby(
        keys.key("f", f"j:{(await client.zrange(keys.key('f', 'q'), 0, 0))[0].decode()}"), "enqueued", -500
    )  # type: ignore[misc]
    (backlog,) = (await broker.backlogs(["f"])).values()
    assert (backlog.queued, backlog.running, backlog.delayed) == (2, 1, 1)
    passed_s = time.monotonic() - began
    assert 500 <= backlog.oldest_ms < 502 + 1000 * passed_s
    assert backlog.arrived_per_s * max(1, passed_s) >= 4 and backlog.arrived_per_s <= 6
    assert backlog.drained_per_s * max(1, passed_s) >= 0.8 and backlog.drained_per_s <= 1.1
    assert backlog.last_active_ms < 2 + 1000 * passed_s


async def test_backlogs_of_many_functions_are_one_round_trip(broker: Broker, client: Redis, job) -> None:
    names = [f"f{i}" for i in range(20)]
    for name in names[:10]:
        await broker.enqueue(job(function=name))
    await client.script_flush()
    backlogs = await broker.backlogs(names)
    assert list(backlogs) == names
    assert [row.queued for row in backlogs.values()] == [1] * 10 + [0] * 10
    assert backlogs["f19"].last_active_ms > 1_000_000_000
    assert await broker.backlogs([]) == {}


async def test_rates_follow_the_load_and_fade(broker: Broker, client: Redis, job, enqueue_all) -> None:
    await enqueue_all([job() for _ in range(500)])
    meta = keys.meta("f")
    await client.hincrby(meta, "arrived:since", -10_000)  # type: ignore[misc]
    rate = (await broker.backlogs(["f"]))["f"].arrived_per_s
    assert 50 < rate < 75
    for name in ("arrived:since", "arrived:at"):
        await client.hincrby(meta, name, -120_000)  # type: ignore[misc]
    assert (await broker.backlogs(["f"]))["f"].arrived_per_s < 0.1


async def test_functions_with_work(broker: Broker, job, start) -> None:
    claim = await start(function="running")
    await broker.enqueue(job(function="queued"))
    await broker.enqueue(job(function="delayed", delay_ms=60_000))
    done = await start(function="idle")
    await broker.done("idle", [Completion(done.job_id, done.fence, b"", b"")])
    assert await broker.functions_with_work() == ["delayed", "queued", "running"]
    await broker.fail("running", [Failure(claim.job_id, claim.fence, b"", retry=False)])
    assert await broker.functions_with_work() == ["delayed", "queued"]


async def test_purge_ends_every_job_and_forgets_the_function(
    broker: Broker, client: Redis, job, start, oracle: Oracle, enqueue_all
) -> None:
    await broker.set_limits("f", Limits(max_queued=500))
    running = await start(worker="w1")
    finished = await start()
    await broker.done("f", [Completion(finished.job_id, finished.fence, b"r", b"u")])
    queued = [job(tenant=f"t{i % 3}", weight=2, priority=i % 3) for i in range(230)]
    await enqueue_all(queued)
    await broker.enqueue(job(delay_ms=60_000))
    await broker.purge_function("f")
    shot = oracle.check("f")
    assert len(shot.usage) == 233
    record = await broker.job(running.job_id)
    assert record is not None and (record.state, record.reason) == (JobState.CANCELLED, "the function was deleted")
    assert await broker.beat("f", "w1", {running.job_id: running.fence}) == {running.job_id: "cancelled"}
    record = await broker.job(finished.job_id)
    assert record is not None and record.result == b"r"
    assert all(ttl > 0 for ttl in shot.ttls.values())
    assert await broker.functions_with_work() == []
    await broker.purge_function("f")


async def test_one_call_of_purge_ends_no_more_than_it_is_to(broker: Broker, client: Redis, job, enqueue_all) -> None:
    await broker.set_limits("f", Limits(max_queued=500))
    await enqueue_all([*(job() for _ in range(3)), *(job(delay_ms=60_000) for _ in range(20))])
    assert [await broker._scripts.run("purge", "f", [3]) for _ in range(3)] == [3, 3, 3]
    assert await client.zcard(keys.key("f", "delay")) == 14


async def test_a_purged_function_can_come_back(broker: Broker, client: Redis, start, oracle: Oracle) -> None:
    before = await start()
    await broker.purge_function("f")
    after = await start()
    assert after.fence > before.fence
    assert await client.pttl(keys.key("f", "use")) == -1
    assert await broker.functions_with_work() == ["f"]
    oracle.check("f")


async def test_a_function_that_another_process_purged_is_listed_again(broker: Broker, client: Redis, job) -> None:
    """Or no sweep would ever look after its jobs."""
    other = Broker(client)
    await broker.enqueue(job())
    await other.enqueue(job())
    await other.purge_function("f")
    again = await broker.enqueue(job())
    assert again.created and await broker.functions_with_work() == ["f"]


async def test_a_job_remembers_which_jobs_code_made_it(broker: Broker, job) -> None:
    for caller in ("g-01", ""):
        made = job(caller=caller)
        await broker.enqueue(made)
        record = await broker.job(made.id)
        assert record is not None and record.caller == caller
