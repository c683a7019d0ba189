import asyncio

import pytest
import redis
from queue_oracle import Oracle
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from stoker.queue import keys
from stoker.queue.broker import Broker
from stoker.queue.claimer import Claimer
from stoker.queue.events import Bells
from stoker.queue.intake import MOST_AT_ONCE
from stoker.queue.records import Enqueued, IdempotencyMismatch, JobState, Limits, QueueFull


def scripts_run(raw: redis.Redis) -> int:
    return raw.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"]


async def test_jobs_of_one_turn_go_in_one_call(broker: Broker, raw: redis.Redis, oracle: Oracle, job) -> None:
    await broker.enqueue(job())
    raw.config_resetstat()
    new = [job(tenant="ab"[n % 2], priority=n % 3, batch_key="k" * (n % 2), delay_ms=n % 5) for n in range(70)]
    answers = await asyncio.gather(*map(broker.enqueue, new))
    assert [answer.job_id for answer in answers] == [each.id for each in new]
    assert scripts_run(raw) == -(-70 // MOST_AT_ONCE)
    shot = oracle.check("f")
    assert [int(shot.jobs[each.id]["place"]) for each in new] == list(range(2, 72))


async def test_functions_do_not_mix(broker: Broker, job, oracle: Oracle) -> None:
    new = [job(function="fg"[n % 2]) for n in range(6)]
    assert [answer.job_id for answer in await asyncio.gather(*map(broker.enqueue, new))] == [each.id for each in new]
    assert len(oracle.check("f").jobs) == len(oracle.check("g").jobs) == 3


async def test_each_job_has_its_own_answer(broker: Broker, oracle: Oracle, job) -> None:
    """The limits hold within a call, and what is refused or known leaves the others alone."""
    await broker.set_limits("f", Limits(max_queued=3, max_queued_per_tenant=2))
    first = job(idempotency_key="k", request_digest=b"1")
    same, other = (job(idempotency_key="k", request_digest=digest) for digest in (b"1", b"2"))
    second, third, fourth, fifth = job(), job(), job(tenant="b"), job(tenant="b")
    new = [first, first, same, other, second, third, fourth, fifth]
    answers = await asyncio.gather(*map(broker.enqueue, new), return_exceptions=True)
    assert [type(answer) for answer in answers] == [
        *[Enqueued] * 3,
        IdempotencyMismatch,
        Enqueued,
        QueueFull,
        Enqueued,
        QueueFull,
    ]
    assert [answer.job_id for answer in answers if isinstance(answer, Enqueued)] == [
        *[first.id] * 3,
        second.id,
        fourth.id,
    ]
    assert [answer.limit for answer in answers if isinstance(answer, QueueFull)] == [
        "max_queued_per_tenant",
        "max_queued",
    ]
    assert set(oracle.check("f").jobs) == {first.id, second.id, fourth.id}


async def test_a_claim_that_stands_takes_what_it_has_room_for_and_the_others_wait(
    broker: Broker, server_url: str, oracle: Oracle, job
) -> None:
    bells = Bells(server_url, "w", on_cancel=lambda *_: None)
    await bells.start()
    claimer = Claimer(broker, bells, "f", "w", 5)
    assert await claimer.claim_or_stand(2) == []
    new = [job() for _ in range(5)]
    answers = await asyncio.gather(*map(broker.enqueue, new))
    assert [answer.state for answer in answers] == [*[JobState.RUNNING] * 2, *[JobState.QUEUED] * 3]
    assert [answer.wake for answer in answers] == [False, False, True, False, False]
    oracle.check("f")
    while not (claims := await claimer.wait()):
        pass
    assert [claim.job_id for claim in claims] == [each.id for each in new[:2]]
    assert [claim.job_id for claim in await claimer.claim_or_stand(4)] == [each.id for each in new[2:]]
    await bells.close()


async def test_a_function_that_another_purged_is_listed_again(broker: Broker, client: Redis, job) -> None:
    await broker.enqueue(job())
    await Broker(client).purge_function("f")
    answers = await asyncio.gather(*(broker.enqueue(job()) for _ in range(3)))
    assert [answer.wake for answer in answers] == [True, False, False]
    assert await client.sismember(keys.FUNCTIONS, "f")  # type: ignore[misc]


async def test_who_gives_up_harms_nobody(broker: Broker, oracle: Oracle, job) -> None:
    """Before the call it isn't made for it; later the job is there."""
    await broker.enqueue(job())
    early, late, other = job(), job(), job()
    tasks = [asyncio.create_task(broker.enqueue(each)) for each in (early, late, other)]
    tasks[0].cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    tasks[1].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(answer, asyncio.CancelledError) for answer in answers] == [True, True, False]
    jobs = oracle.check("f").jobs
    assert early.id not in jobs and late.id in jobs and other.id in jobs


async def test_all_of_a_call_hear_that_its_reply_was_lost(broker: Broker, lose_reply, oracle: Oracle, job) -> None:
    new = [job(), job()]

    async def both() -> None:
        answers = await asyncio.gather(*map(broker.enqueue, new), return_exceptions=True)
        assert all(isinstance(answer, RedisConnectionError) for answer in answers)
        raise answers[0]  # type: ignore[misc]

    await lose_reply(both)
    answers = await asyncio.gather(*map(broker.enqueue, new))
    assert [(answer.created, answer.wake) for answer in answers] == [(True, True), (True, False)]
    assert len(oracle.check("f").jobs) == 2


@pytest.mark.parametrize("usual", [True, False])
async def test_what_a_record_leaves_out_is_known_to_its_readers(
    broker: Broker, client: Redis, job, usual: bool
) -> None:
    rare = {"priority": 2, "cost": 2.5, "max_attempts": 7, "batch_key": "k", "retention_ms": 90_000, "stream": True}
    new = job(
        **(
            {}
            if usual
            else {
                **rare,
                "run_within_ms": 5000,
                "finish_within_ms": 60_000,
                "webhook": "https://x/",
                "route": b"\x00\xff",
            }
        )
    )
    await broker.enqueue(new)
    stored = set(await client.hgetall(keys.key("f", f"j:{new.id}")))  # type: ignore[misc]
    added = {b"priority", b"cost", b"max", b"keep", b"batch", b"stream", b"run", b"hook", b"route", b"finish_by"}
    assert stored == {b"state", b"tenant", b"place", b"enqueued", b"gates", b"wake"} | (set() if usual else added)
    read = await broker.job(new.id)
    assert read is not None
    assert (read.max_attempts, read.priority, read.stream) == (new.max_attempts, new.priority, new.stream)
    assert (read.webhook, read.route) == (new.webhook, new.route)
    (claim,) = await broker.claim("f", "w", 1)
    assert (claim.max_attempts, claim.priority, claim.stream) == (new.max_attempts, new.priority, new.stream)
    assert (claim.gateway, claim.run_within_ms, claim.payload) == (new.gateway, new.run_within_ms, new.payload)
    assert float(await client.hget(keys.key("f", "v"), "a") or 0) == new.cost  # type: ignore[misc]
    assert await broker.cancel(new.id) is JobState.CANCELLED
    assert new.retention_ms - 5000 < await client.pttl(keys.key("f", f"j:{new.id}")) <= new.retention_ms


async def test_a_job_that_cannot_be_sent_harms_no_other(broker: Broker, oracle: Oracle, job) -> None:
    bad = [job(start_within_ms=1 << 64), job(payload=None), job(webhook="\ud800")]
    new = [job(), bad[0], job(), bad[1], bad[2], job()]
    answers = await asyncio.gather(*map(broker.enqueue, new), return_exceptions=True)
    assert [type(answer) for answer in answers] == [
        *(Enqueued, OverflowError, Enqueued),
        *(TypeError, UnicodeEncodeError, Enqueued),
    ]
    assert oracle.check("f").jobs.keys() == {each.id for each in new if each not in bad}


async def test_a_job_that_comes_while_its_function_is_forgotten_is_swept(
    broker: Broker, client: Redis, raw: redis.Redis, job, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.enqueue(job())
    forget, late = client.srem, job()

    async def meanwhile(*args: str) -> int:
        await broker.enqueue(late)
        return await forget(*args)  # type: ignore[misc]

    other = Broker(client)
    monkeypatch.setattr(client, "srem", meanwhile)
    await other.purge_function("f")
    assert raw.sismember(keys.FUNCTIONS, "f")
    assert await broker.functions_with_work() == ["f"]
