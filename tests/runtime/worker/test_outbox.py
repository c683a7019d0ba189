"""Order and batches of what a replica writes, on a real server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.queue.broker import Broker
from stoker.queue.client import connect
from stoker.queue.embedded import EmbeddedValkey
from stoker.queue.records import Claim, Completion, Emission, JobState, NewJob, new_job_id
from stoker.runtime.worker.outbox import EMITTED_AT_ONCE, Outbox

FUNCTION = "f"
JOBS = 2 * EMITTED_AT_ONCE + 5


class Counting(Broker):
    """Remembers how many chunks left with each call."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.batches: list[int] = []

    def emit(self, function: str, emissions: Sequence[Emission]) -> Awaitable[list[str]]:
        self.batches.append(len(emissions))
        return super().emit(function, emissions)


class Kept(Broker):
    """Keeps what it is given, when it is given; each call is answered when `answer` is set."""

    def __init__(self) -> None:
        self.parts: list[Sequence[Emission]] = []
        self.waiting = 0
        self.answer = asyncio.Event()

    def emit(self, function: str, emissions: Sequence[Emission]) -> Awaitable[list[str]]:
        self.parts.append([*emissions])
        return self._answered()

    async def _answered(self) -> list[str]:
        self.waiting += 1
        await self.answer.wait()
        self.waiting -= 1
        return []


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedValkey(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server.url
    server.stop()


@pytest.fixture
async def broker(url: str) -> AsyncIterator[Counting]:
    client = connect(url)
    await client.flushall()
    yield Counting(client)
    await client.aclose()


async def claimed(broker: Broker, count: int) -> list[Claim]:
    for _ in range(count):
        await broker.enqueue(NewJob(id=new_job_id(FUNCTION), function=FUNCTION, tenant="a", payload=b"", stream=True))
    return await broker.claim(FUNCTION, "w", count)


async def test_a_step_of_many_jobs_leaves_in_parts_and_in_order(broker: Counting) -> None:
    outbox = Outbox(broker, FUNCTION, pytest.fail)
    outbox.start()
    claims = await claimed(broker, JOBS)
    for step in range(3):
        for claim in claims:
            outbox.emit(claim.job_id, claim.fence, b"%d" % step)
    for claim in claims:
        outbox.complete(Completion(claim.job_id, claim.fence, b"result", b"usage"))
    await outbox.drained()
    await outbox.close()
    assert sum(broker.batches) == 3 * JOBS
    assert len(broker.batches) >= 3
    for claim in claims:
        assert [chunk.data for chunk in await broker.chunks(claim.job_id)] == [b"0", b"1", b"2"]
        job = await broker.job(claim.job_id)
        assert job is not None and job.state is JobState.SUCCEEDED


@given(st.lists(st.integers(0, 99), max_size=200), st.sets(st.integers(0, 199)))
async def test_a_jobs_chunks_are_in_order_and_never_under_way_twice(jobs: list[int], turns: set[int]) -> None:
    """`turns`: behind which chunks the event loop turns, so that what has left is behind others."""
    kept = Kept()
    kept.answer.set()
    outbox = Outbox(kept, FUNCTION, pytest.fail)
    outbox.start()
    for seq, job in enumerate(jobs):
        outbox.emit(f"job-{job}", 1, b"%d" % seq)
        if seq in turns:
            await asyncio.sleep(0)
    await outbox.drained()
    await outbox.close()
    assert sorted(int(emission.data) for part in kept.parts for emission in part) == list(range(len(jobs)))
    for job in set(jobs):
        own = [emission for part in kept.parts for emission in part if emission.job_id == f"job-{job}"]
        assert [int(emission.data) for emission in own] == [seq for seq, each in enumerate(jobs) if each == job]
        assert [emission.seq for emission in own] == list(range(1, len(own) + 1))


async def test_a_full_part_leaves_at_once() -> None:
    kept = Kept()
    kept.answer.set()
    outbox = Outbox(kept, FUNCTION, pytest.fail)
    outbox.start()
    for job in range(2 * EMITTED_AT_ONCE + 1):
        outbox.emit(f"job-{job}", 1, b"x")
    assert [len(part) for part in kept.parts] == [EMITTED_AT_ONCE, EMITTED_AT_ONCE]
    await outbox.drained()
    await outbox.close()
    assert len(kept.parts[2]) == 1


async def test_what_belongs_behind_a_part_waits_until_that_is_stored() -> None:
    """Sent again after a lost connection, the first chunk would be taken for one that was stored before."""
    kept = Kept()
    outbox = Outbox(kept, FUNCTION, pytest.fail)
    outbox.start()
    for job in range(EMITTED_AT_ONCE):
        outbox.emit(f"job-{job}", 1, b"first")
    for job in range(EMITTED_AT_ONCE):
        outbox.emit(f"job-{job}", 1, b"second")
    for _ in range(20):
        await asyncio.sleep(0)
    assert (len(kept.parts), kept.waiting) == (1, 1)
    kept.answer.set()
    await outbox.drained()
    await outbox.close()
    assert [{emission.data for emission in part} for part in kept.parts] == [{b"first"}, {b"second"}]


async def test_every_lost_job_of_a_step_is_told(broker: Counting) -> None:
    lost: list[str] = []
    outbox = Outbox(broker, FUNCTION, lost.append)
    outbox.start()
    claims = await claimed(broker, JOBS)
    gone = [claim.job_id for claim in claims[::10]]
    for job_id in gone:
        await broker.cancel(job_id)
    for claim in claims:
        outbox.emit(claim.job_id, claim.fence, b"chunk")
    await outbox.drained()
    await outbox.close()
    assert sorted(lost) == sorted(gone)
    assert [len(await broker.chunks(claim.job_id)) for claim in claims] == [int(c.job_id not in gone) for c in claims]
