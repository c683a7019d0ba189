"""Pages of jobs add up to all jobs, whatever the page size, and nobody sees another tenant's."""

import asyncio
from collections import Counter

import pytest
from redis.asyncio import Redis

from stoker.queue import keys
from stoker.queue.broker import Broker
from stoker.queue.listing import Listing, Place
from stoker.queue.records import Completion, Failure, Job, JobState, Metered, NewJob, new_job_id

FUNCTIONS = ("f", "g", "t.h")


async def pages(listing: Listing, limit: int, functions=FUNCTIONS, **options: str) -> list[Job]:
    found: list[Job] = []
    place: Place | None = None
    while True:
        page = await listing.page(functions, limit, place, **options)
        assert len(page.jobs) <= limit
        found += page.jobs
        if page.next is None:
            return found
        place = Place.of(str(page.next))


@pytest.fixture
async def world(broker: Broker) -> dict[str, Job]:
    """Jobs of three functions and two tenants in every state."""
    ids = []
    for function in FUNCTIONS:
        for number in range(14):
            new = NewJob(
                id=new_job_id(function),
                function=function,
                tenant="ab"[number % 2],
                payload=b"",
                batch_key=str(number % 3),
                priority=number % 3,
                max_attempts=1 if number == 6 else 2,
            )
            await broker.enqueue(new)
            ids.append(new.id)
        claims = [(await broker.claim(function, "w", 1))[0] for _ in range(8)]
        ends = [Completion(each.job_id, each.fence, b"r", b"u") for each in claims[:2]]
        await broker.done(function, ends)
        await broker.fail(function, [Failure(claims[2].job_id, claims[2].fence, b"e", retry=False)])
        await broker.cancel(claims[3].job_id)
        await broker.meter(function, [Metered(claims[3].job_id, claims[3].fence, b"used")])
        broker._backoff = (60_000, 60_000)
        await broker.fail(function, [Failure(each.job_id, each.fence, b"e", retry=True) for each in claims[4:6]])
        broker._backoff = (1, 2)
        await broker.fail(function, [Failure(claims[6].job_id, claims[6].fence, b"e", retry=False)])
        await broker.replay(claims[2].job_id)
        late = NewJob(id=new_job_id(function), function=function, tenant="a", payload=b"", delay_ms=60_000)
        await broker.enqueue(late)
        ids.append(late.id)
        await broker.cancel((await broker.claim(function, "w", 1))[0].job_id)
    return {id: job for id in ids if (job := await broker.job(id))}


@pytest.mark.parametrize("limit", [1, 2, 5, 100])
async def test_pages_add_up(client: Redis, world: dict[str, Job], limit: int) -> None:
    found = await pages(Listing(client), limit)
    assert {job.id for job in found} == set(world) and len(found) == len(world)
    assert len({job.state for job in found}) >= 5
    sections = [0 if job.state is JobState.RUNNING else 2 if job.state.terminal else 1 for job in found]
    assert sections == sorted(sections)
    ends = [job.finished_ms for job in found if job.finished_ms and job.state.terminal]
    assert ends == sorted(ends, reverse=True)
    assert found == await pages(Listing(client), 1000)


@pytest.mark.parametrize("state", ["", *JobState])
@pytest.mark.parametrize("tenant", ["", "a", "b", "none"])
async def test_of_one_tenant_and_one_state(client: Redis, world: dict[str, Job], tenant: str, state: str) -> None:
    found = await pages(Listing(client), 3, tenant=tenant, state=state)
    wanted = [job for job in world.values() if tenant in ("", job.tenant) and state in ("", job.state)]
    assert Counter(job.id for job in found) == Counter(job.id for job in wanted)


async def test_of_one_function(client: Redis, world: dict[str, Job]) -> None:
    found = await pages(Listing(client), 4, ("g",))
    assert {job.id for job in found} == {job.id for job in world.values() if job.function == "g"}
    assert await pages(Listing(client), 4, ("unknown",)) == []


async def test_waiting_jobs_stand_in_their_order_and_more_come_behind(
    broker: Broker, client: Redis, job, enqueue_all
) -> None:
    jobs = [job(tenant="ab"[number % 2], batch_key=str(number % 5)) for number in range(60)]
    await enqueue_all(jobs)
    for tenant in ("", "a"):
        wanted = [each.id for each in jobs if tenant in ("", each.tenant)]
        assert [each.id for each in await pages(Listing(client), 7, ("f",), tenant=tenant)] == wanted
    first = await Listing(client).page(("f",), 10)
    await broker.claim("f", "w", 20)
    late = job()
    await broker.enqueue(late)
    rest = await Listing(client).page(("f",), 100, first.next)
    assert late.id in [each.id for each in rest.jobs]
    assert not {each.id for each in first.jobs} & {each.id for each in rest.jobs}


async def test_what_is_no_longer_kept_is_not_listed(broker: Broker, client: Redis, start) -> None:
    claims = [await start() for _ in range(7)]
    await broker.done("f", [Completion(each.job_id, each.fence, b"r", b"u") for each in claims])
    assert len(await pages(Listing(client), 2, ("f",))) == 7
    for each in claims[:6]:
        await client.pexpire(keys.key("f", f"j:{each.job_id}"), 1)
    await asyncio.sleep(0.05)
    assert [each.id for each in await pages(Listing(client), 2, ("f",))] == [claims[6].job_id]


async def test_another_tenants_flood_is_passed_over(client: Redis, job, enqueue_all) -> None:
    mine = job(tenant="mine")
    await enqueue_all([*(job(tenant="flood") for _ in range(5000)), mine])
    page = await Listing(client).page(("f",), 10, tenant="mine")
    assert [each.id for each in page.jobs] == [mine.id] and page.next is None


@pytest.mark.parametrize("text", ["", "a:b", "a:b:c", "ended:f:1:2"])
def test_places_that_are_none(text: str) -> None:
    with pytest.raises(ValueError):
        Place.of(text)
