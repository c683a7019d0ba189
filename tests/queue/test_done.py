import time

from queue_oracle import Oracle
from redis.asyncio import Redis

from stoker.queue import keys
from stoker.queue.broker import Broker
from stoker.queue.records import Completion, Emission, Failure, JobState, Settled


async def test_the_record_has_everything(broker: Broker, start, oracle: Oracle) -> None:
    claim = await start()
    answer = await broker.done("f", [Completion(claim.job_id, claim.fence, b"\x00\xffresult", b"usage", b"notes")])
    assert answer == [Settled.DONE]
    job = await broker.job(claim.job_id)
    assert job is not None
    assert (job.state, job.result, job.usage, job.notes) == (JobState.SUCCEEDED, b"\x00\xffresult", b"usage", b"notes")
    assert (job.error, job.reason, job.queued_ahead) == (None, "", None)
    assert job.finished_ms is not None and job.finished_ms >= claim.claimed_ms
    (record,) = oracle.check("f").usage
    assert (record["tenant"], record["state"], record["usage"], record["attempt"]) == ("a", "succeeded", "usage", "1")


async def test_a_replay_is_the_same_answer_and_no_second_record(broker: Broker, start, oracle: Oracle) -> None:
    claims = [await start(stream=bool(i % 2)) for i in range(4)]
    completions = [Completion(claim.job_id, claim.fence, b"r", b"u", cost=3.0) for claim in claims]
    assert await broker.done("f", completions) == [Settled.DONE] * 4
    before = oracle.check("f")
    assert await broker.done("f", completions) == [Settled.DONE] * 4
    after = oracle.check("f")
    assert (after.jobs, after.usage, after.zsets) == (before.jobs, before.usage, before.zsets)


async def test_a_stale_fence_changes_nothing(broker: Broker, client: Redis, start, oracle: Oracle) -> None:
    old = await start(stream=True)
    await client.zadd(keys.key("f", "lease"), {old.job_id: 1})
    await broker.tick("f")
    stale = Completion(old.job_id, old.fence, b"old result", b"old usage", b"old notes", cost=1000.0)
    before = oracle.check("f")
    assert await broker.done("f", [stale]) == [Settled.STALE]
    assert oracle.check("f") == before
    (new,) = await broker.claim("f", "w2", 1)
    before = oracle.check("f")
    assert await broker.done("f", [stale]) == [Settled.STALE]
    assert oracle.check("f") == before
    assert await broker.done("f", [Completion(new.job_id, new.fence, b"new", b"u")]) == [Settled.DONE]
    assert await broker.done("f", [stale]) == [Settled.STALE]
    job = await broker.job(old.job_id)
    assert job is not None and job.result == b"new"
    assert len(oracle.check("f").usage) == 1


async def test_the_first_verdict_of_an_attempt_stands(broker: Broker, start, oracle: Oracle) -> None:
    claim = await start()
    await broker.done("f", [Completion(claim.job_id, claim.fence, b"r", b"u")])
    assert await broker.fail("f", [Failure(claim.job_id, claim.fence, b"e", retry=True)]) == [Settled.DONE]
    job = await broker.job(claim.job_id)
    assert job is not None and (job.state, job.result) == (JobState.SUCCEEDED, b"r")


async def test_one_bad_item_does_not_hurt_its_neighbours(broker: Broker, start) -> None:
    good, other = await start(), await start()
    answers = await broker.done(
        "f",
        [
            Completion("f-01M8P9NXY7T1PMWEYN7D70NQY6", 1, b"", b""),
            Completion(good.job_id, good.fence, b"", b""),
            Completion(other.job_id, other.fence + 1, b"", b""),
        ],
    )
    assert answers == [Settled.STALE, Settled.DONE, Settled.STALE]


async def test_held_time_adds_up_over_attempts(broker: Broker, client: Redis, start, oracle: Oracle) -> None:
    began = time.monotonic()
    claim = await start()
    job_key = keys.key("f", f"j:{claim.job_id}")
    await client.hincrby(job_key, "began", -1000)  # type: ignore[misc]
    await broker.fail("f", [Failure(claim.job_id, claim.fence, b"", retry=True, counts=False)])
    (second,) = await broker.claim("f", "w", 1)
    await client.hincrby(job_key, "began", -500)  # type: ignore[misc]
    await broker.done("f", [Completion(claim.job_id, second.fence, b"", b"")])
    (record,) = oracle.check("f").usage
    assert 1500 <= int(record["held_ms"]) <= 1500 + (time.monotonic() - began) * 1000 + 2


async def test_the_usage_stream_is_bounded(broker: Broker, client: Redis, start) -> None:
    use = keys.key("f", "use")
    await client.eval("for i = 1, 101000 do redis.call('XADD', KEYS[1], '*', 'job', i) end", 1, use)  # type: ignore[misc]
    claim = await start()
    await broker.done("f", [Completion(claim.job_id, claim.fence, b"", b"")])
    assert 100_000 <= await client.xlen(use) < 100_500


async def test_late_progress_does_not_reopen_a_job(broker: Broker, start) -> None:
    claim = await start(stream=True)
    await broker.done("f", [Completion(claim.job_id, claim.fence, b"r", b"u")])
    assert await broker.emit("f", [Emission(claim.job_id, claim.fence, 1, b"x")]) == [claim.job_id]
    assert await broker.beat("f", "w", {claim.job_id: claim.fence}) == {claim.job_id: "lost"}
    assert await broker.cancel(claim.job_id) is JobState.SUCCEEDED
