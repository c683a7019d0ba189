"""Order and batches of what a replica writes, on a real server."""

from collections.abc import AsyncIterator, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.queue.broker import Broker
from stoker.queue.client import connect
from stoker.queue.embedded import EmbeddedValkey
from stoker.queue.records import Claim, Completion, Emission, JobState, NewJob, new_job_id
from stoker.runtime.worker.outbox import EMITTED_AT_ONCE, Outbox, parts_of

FUNCTION = "f"
JOBS = 2 * EMITTED_AT_ONCE + 5


class Counting(Broker):
    """Remembers how many chunks left with each call."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.batches: list[int] = []

    async def emit(self, function: str, emissions: Sequence[Emission]) -> list[str]:
        self.batches.append(len(emissions))
        return await super().emit(function, emissions)


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


@given(st.lists(st.integers(0, 99), max_size=200))
def test_parts_keep_each_jobs_chunks_together_and_in_order(jobs: list[int]) -> None:
    emissions = [Emission(f"job-{job}", 1, seq, b"") for seq, job in enumerate(jobs)]
    parts = parts_of(emissions)
    homes = {emission.job_id: n for n, part in enumerate(parts) for emission in part}
    assert all(homes[emission.job_id] == n for n, part in enumerate(parts) for emission in part)
    assert sorted(emission.seq for part in parts for emission in part) == list(range(len(jobs)))
    for job in set(jobs):
        sequence = [emission.seq for part in parts for emission in part if emission.job_id == f"job-{job}"]
        assert sequence == sorted(sequence)
    assert all(len(part) >= EMITTED_AT_ONCE for part in parts[:-1])


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
