"""Claims that stand: the next job comes by itself, as if it had been claimed just then, and is never in two hands."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest
import redis
from redis.asyncio import Redis

from stoker.queue import claimer as claimer_module
from stoker.queue import keys
from stoker.queue.broker import Broker, ClaimTicket
from stoker.queue.claimer import Claimer
from stoker.queue.events import Bells
from stoker.queue.records import Claim, Completion, JobState, Limits, NewJob

WAIT_S = 0.3

Make = Callable[..., Claimer]


@pytest.fixture
async def bells(server_url: str, broker: Broker) -> AsyncIterator[Bells]:
    subject = Bells(server_url, "w", on_cancel=lambda *_: None)
    await subject.start()
    while await subject.wait("f", 0.05):
        pass
    yield subject
    await subject.close()


@pytest.fixture
def claimer(broker: Broker, bells: Bells, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Their claims stand for longer than a busy machine may need for the next step."""
    monkeypatch.setattr(claimer_module, "STAND_MARGIN_MS", 5000)
    return lambda function="f", wait_s=WAIT_S: Claimer(broker, bells, function, "w", wait_s)


def ids(claims: list[Claim]) -> list[str]:
    return [claim.job_id for claim in claims]


async def heard(subject: Claimer) -> list[Claim]:
    """A wait may end early, when the bell rang before."""
    async with asyncio.timeout(15):
        while not (claims := await subject.wait()):
            pass
    return claims


def deaf(bells: Bells) -> None:
    """Messages arrive and are lost."""
    bells._subscriber._on_message = lambda channel, data: None


async def test_a_job_comes_by_itself(claimer: Make, broker: Broker, oracle, raw: redis.Redis, job) -> None:
    subject, new = claimer(wait_s=20), job(run_within_ms=60_000, stream=True)
    assert await subject.claim_or_stand(3) == []
    waiting = asyncio.create_task(heard(subject))
    await asyncio.sleep(0)
    before = raw.info("commandstats")["cmdstat_evalsha"]["calls"]
    answer = await broker.enqueue(new)
    (claim,) = await asyncio.wait_for(waiting, 15)
    assert raw.info("commandstats")["cmdstat_evalsha"]["calls"] == before + 1
    assert (answer.state, answer.wake, answer.queued) == (JobState.RUNNING, False, 0)
    assert (claim.job_id, claim.payload, claim.attempt, claim.stream) == (new.id, new.payload, 1, True)
    assert (claim.tenant, claim.gateway, claim.run_within_ms, claim.max_attempts) == ("a", "gw", 60_000, 3)
    shot = oracle.check("f")
    assert int(shot.jobs[new.id]["fence"]) == claim.fence
    assert set(shot.zsets["lease"]) == set(shot.zsets["dl"]) == {new.id}
    assert await subject.claim_or_stand(3) == []
    assert await broker.done("f", [Completion(new.id, claim.fence, b"r", b"u")])
    assert oracle.check("f").jobs[new.id]["state"] == "succeeded"


async def test_it_is_stored_and_charged_as_if_it_had_been_claimed(
    claimer: Make, broker: Broker, client: Redis, job
) -> None:
    same = {"cost": 5.0, "finish_within_ms": 60_000, "batch_key": "k", "priority": 0}
    for tenant in ("a", "b", "a"):
        subject = claimer("f")
        assert await subject.claim_or_stand(1) == []
        weight = 2 if tenant == "a" else 1
        await broker.enqueue(job(tenant=tenant, weight=weight, function="f", **same))
        assert await heard(subject)
        await broker.enqueue(job(tenant=tenant, weight=weight, function="g", **same))
        assert await broker.claim("g", "w", 1)
    rows = {}
    for function in ("f", "g"):
        (record, *_) = [key async for key in client.scan_iter(f"stoker:q:{{{function}}}:j:*")]
        fields = {name for name in await client.hgetall(record)} - {b"wake"}
        meta = await client.hgetall(keys.meta(function))
        rows[function] = fields, meta[b"vtime"], meta[b"place"], await client.hgetall(keys.key(function, "v"))
    assert rows["f"] == rows["g"]
    assert rows["f"][3] == {b"a": b"5", b"b": b"5"}


async def test_jobs_that_come_together_go_to_those_who_stand_as_far_as_they_have_room(
    claimer: Make, broker: Broker, bells: Bells, oracle, job
) -> None:
    first, second = claimer(wait_s=20), claimer(wait_s=20)
    assert await first.claim_or_stand(3) == []
    await asyncio.sleep(0.002)
    assert await second.claim_or_stand(2) == []
    jobs = [job(run_within_ms=60_000, cost=2.0) for _ in range(7)]
    answers = await asyncio.gather(*map(broker.enqueue, jobs))
    assert [answer.state for answer in answers] == [JobState.RUNNING] * 5 + [JobState.QUEUED] * 2
    assert [answer.wake for answer in answers] == [False] * 5 + [True, False]
    got = [await heard(first), await heard(second)]
    assert [ids(claims) for claims in got] == [[new.id for new in jobs[:3]], [new.id for new in jobs[3:5]]]
    fences = [claim.fence for claims in got for claim in claims]
    assert fences == list(range(fences[0], fences[0] + 5))
    shot = oracle.check("f")
    assert set(shot.zsets["lease"]) == set(shot.zsets["dl"]) == {new.id for new in jobs[:5]}
    assert await broker._redis.hgetall(keys.key("f", "v")) == {b"a": b"10"}
    assert float(await broker._redis.hget(keys.meta("f"), "vtime")) == 8
    assert ids(await first.claim_or_stand(3)) == [new.id for new in jobs[5:]]


async def test_of_several_tenants_jobs_a_claim_chooses(claimer: Make, broker: Broker, job) -> None:
    """One would get all the room otherwise, because it came first by a hair."""
    subject = claimer(wait_s=20)
    assert await subject.claim_or_stand(4) == []
    jobs = [job(tenant=tenant) for tenant in "aaaabb"]
    await asyncio.gather(*map(broker.enqueue, jobs))
    assert ids(await heard(subject)) == [jobs[0].id]
    claims = await subject.claim_or_stand(4)
    assert sorted(claim.tenant for claim in claims) == ["a", "a", "b", "b"]


async def test_jobs_of_another_batch_are_not_handed_over_with_the_first(claimer: Make, broker: Broker, job) -> None:
    subject = claimer(wait_s=20)
    assert await subject.claim_or_stand(4) == []
    jobs = [job(batch_key=key) for key in ("k", "k", "other", "k")]
    await asyncio.gather(*map(broker.enqueue, jobs))
    assert ids(await heard(subject)) == [new.id for new in jobs[:2]]
    assert ids(await subject.claim_or_stand(4)) == [jobs[2].id]


async def test_a_message_of_several_jobs_that_is_lost_is_asked_for(
    claimer: Make, bells: Bells, broker: Broker, job
) -> None:
    subject, jobs = claimer(wait_s=0.01), [job() for _ in range(3)]
    deaf(bells)
    assert await subject.claim_or_stand(3) == []
    await asyncio.gather(*map(broker.enqueue, jobs))
    await broker.cancel(jobs[1].id)
    assert await subject.wait() == []
    assert ids(await subject.claim_or_stand(3)) == [jobs[0].id, jobs[2].id]
    assert await subject.claim_or_stand(3) == []


async def test_a_message_that_is_lost_is_asked_for(claimer: Make, bells: Bells, broker: Broker, job) -> None:
    subject, first, second = claimer(wait_s=0.01), job(), job()
    deaf(bells)
    assert await subject.claim_or_stand(3) == []
    await broker.enqueue(first)
    await broker.enqueue(second)
    assert await subject.wait() == []
    assert ids(await subject.claim_or_stand(3)) == [first.id]
    assert ids(await subject.claim_or_stand(3)) == [second.id]


async def test_a_message_that_comes_late_gives_the_job_once(claimer: Make, bells: Bells, broker: Broker, job) -> None:
    held: list[tuple[str, bytes]] = []
    hear, bells._subscriber._on_message = bells._on_message, lambda *message: held.append(message)
    subject, first, second = claimer(wait_s=0.01), job(), job()
    assert await subject.claim_or_stand(3) == []
    await broker.enqueue(first)
    assert await subject.wait() == []
    assert ids(await subject.claim_or_stand(3)) == [first.id]
    assert await subject.claim_or_stand(3) == []
    for message in held:
        hear(*message)
    assert await subject.wait() == []
    bells._subscriber._on_message = hear
    assert await subject.claim_or_stand(3) == []
    await broker.enqueue(second)
    assert ids(await heard(subject)) == [second.id]


async def test_a_message_that_overtakes_the_answer_is_kept(claimer: Make, bells: Bells, broker: Broker, job) -> None:
    subject, new = claimer(), job()
    claiming = asyncio.create_task(subject.claim_or_stand(3))
    while await broker._redis.zcard(keys.key("f", "st")) == 0:
        await asyncio.sleep(0)
    await broker.enqueue(new)
    assert await claiming == []
    assert ids(await heard(subject)) == [new.id]


async def test_a_lost_reply_of_the_claim_that_stood(claimer: Make, broker: Broker, lose_reply, job) -> None:
    subject, new = claimer(), job()
    assert await lose_reply(lambda: subject.claim_or_stand(3)) == []
    await broker.enqueue(new)
    assert ids(await subject.claim_or_stand(3)) == [new.id]
    assert await subject.claim_or_stand(3) == []


async def test_a_job_that_ended_before_it_was_asked_for(claimer: Make, bells: Bells, broker: Broker, job) -> None:
    subject, gone, new = claimer(wait_s=0.01), job(), job()
    deaf(bells)
    assert await subject.claim_or_stand(3) == []
    await broker.enqueue(gone)
    await broker.cancel(gone.id)
    assert await subject.wait() == []
    assert await subject.claim_or_stand(3) == []
    await broker.enqueue(new)
    assert await subject.wait() == []
    assert ids(await subject.claim_or_stand(3)) == [new.id]


async def test_a_job_comes_with_its_tenants_weight(claimer: Make, broker: Broker, job) -> None:
    """However it comes: by itself, with the answer of a claim, or with the same answer again."""
    subject = claimer(wait_s=20)
    assert await subject.claim_or_stand(2) == []
    for weight in (2.5, 2.5, 3):
        await broker.enqueue(job(weight=weight))
    (handed,) = await heard(subject)
    assert handed.weight == 2.5
    ticket = ClaimTicket()
    for _ in range(2):
        assert [claim.weight for claim in await broker.claim_with(ticket, "f", "w", 2)] == [3, 3], "the last one holds"
        ticket.number -= 1


async def test_who_stands_longest_is_first(claimer: Make, broker: Broker, job) -> None:
    claimers = [claimer() for _ in range(3)]
    for subject in claimers:
        assert await subject.claim_or_stand(1) == []
        await asyncio.sleep(0.002)
    jobs = [job() for _ in claimers]
    for new in jobs:
        await broker.enqueue(new)
    assert [ids(await heard(subject)) for subject in claimers] == [[new.id] for new in jobs]


async def test_a_claim_that_stands_no_more_gets_nothing(claimer: Make, broker: Broker, bells: Bells, job) -> None:
    subject, new = claimer(), job()
    assert await subject.claim_or_stand(1) == []
    assert await subject.leave() == []
    assert (await broker.enqueue(new)).state is JobState.QUEUED
    assert await bells.wait("f", 1)


async def test_who_leaves_gets_what_was_handed_over(claimer: Make, broker: Broker, job) -> None:
    subject, new = claimer(), job()
    assert await subject.claim_or_stand(1) == []
    await broker.enqueue(new)
    assert ids(await subject.leave()) == [new.id]


async def test_a_stand_ends(claimer: Make, broker: Broker, bells: Bells, client: Redis, job) -> None:
    subject = claimer()
    assert await subject.claim_or_stand(1) == []
    (entry,) = await client.zrange(keys.key("f", "st"), 0, -1)
    await client.zadd(keys.key("f", "st"), {entry: time.time() * 1000 - 1})
    assert (await broker.enqueue(job())).state is JobState.QUEUED
    assert await bells.wait("f", 1)


async def test_a_worker_that_is_gone_gets_nothing(claimer: Make, bells: Bells, broker: Broker, job) -> None:
    subject = claimer()
    assert await subject.claim_or_stand(1) == []
    await bells.close()
    answer = await broker.enqueue(job())
    assert (answer.state, answer.wake) == (JobState.QUEUED, True)


async def test_limits_on_running_jobs_hold(claimer: Make, broker: Broker, job) -> None:
    for limits in (Limits(max_running=1), Limits(max_running_per_tenant=1)):
        await broker.set_limits("f", limits)
        subject = claimer(wait_s=0.01)
        assert await subject.claim_or_stand(3) == []
        for new in (job(), job()):
            await broker.enqueue(new)
        claims = await subject.wait() or await subject.claim_or_stand(3)
        assert len(claims) == 1
        assert await subject.claim_or_stand(3) == []
        await broker.purge_function("f")


async def test_delayed_jobs_and_those_behind_others_are_not_handed_over(claimer: Make, broker: Broker, job) -> None:
    subject = claimer()
    assert await subject.claim_or_stand(1) == []
    assert (await broker.enqueue(job(delay_ms=60_000))).state is JobState.QUEUED
    handed, first, second = job(), job(), job()
    assert (await broker.enqueue(handed)).state is JobState.RUNNING
    assert ids(await heard(subject)) == [handed.id]
    await broker.enqueue(first)
    await broker.enqueue(second)
    assert ids(await subject.claim_or_stand(1)) == [first.id]


async def test_batch_work_waits_for_a_claim_that_has_room_for_it(claimer: Make, broker: Broker, job) -> None:
    """It is handed to no standing claim; other work that comes behind it rings, though it isn't alone."""
    subject, usual = claimer(wait_s=20), job()
    assert await subject.claim_or_stand(1, lowest=0) == []
    assert (await broker.enqueue(job(priority=2))).state is JobState.QUEUED
    assert await subject.wait() == []
    assert await subject.claim_or_stand(1, lowest=0) == []
    await broker.enqueue(usual)
    assert await subject.wait() == []
    assert ids(await subject.claim_or_stand(1, lowest=0)) == [usual.id]
    assert await subject.claim_or_stand(1, lowest=0) == []
    subject.nudge()
    assert await subject.wait() == []
    assert [claim.priority for claim in await subject.claim_or_stand(1, lowest=1)] == [2]


async def test_many_claimers_share_without_a_double(claimer: Make, broker: Broker, oracle, job) -> None:
    got: list[str] = []
    seen: list[NewJob] = []
    jobs = [job(tenant="ab"[i // 50 % 2]) for i in range(200)]

    async def serve(subject: Claimer) -> None:
        while len(got) < len(jobs):
            claims = await subject.claim_or_stand(2) or await subject.wait()
            got.extend(ids(claims))
            await broker.done("f", [Completion(claim.job_id, claim.fence, b"r", b"u") for claim in claims])

    serving = [asyncio.create_task(serve(claimer(wait_s=0.02))) for _ in range(4)]
    while jobs[len(seen) :]:
        several = jobs[len(seen) : len(seen) + 1 + len(seen) % 5]
        await asyncio.gather(*map(broker.enqueue, several))
        seen += several
        if several[0].id[-1] in "05AF":
            await asyncio.sleep(0.002)
    async with asyncio.timeout(20):
        await asyncio.gather(*serving)
    assert sorted(got) == sorted(new.id for new in jobs)
    assert {row["state"] for row in oracle.check("f").jobs.values()} == {"succeeded"}


async def test_a_function_that_is_deleted_has_no_claims_left(claimer: Make, broker: Broker, job) -> None:
    assert await claimer().claim_or_stand(1) == []
    await broker.purge_function("f")
    assert (await broker.enqueue(job())).state is JobState.QUEUED
