"""What all replicas share: jobs with their payloads, held while those are read; leaving; waiting for room."""

import asyncio
import math
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from stoker.coldstart.store import ObjectStore, open_store
from stoker.queue.broker import Broker
from stoker.queue.client import connect
from stoker.queue.cluster import Cluster
from stoker.queue.embedded import EmbeddedValkey
from stoker.queue.events import Bells
from stoker.queue.records import JobState, Limits, NewJob, QueueFull, new_job_id, pack, unpack
from stoker.runtime import payloads
from stoker.runtime.logs.log_book import LogBook
from stoker.runtime.settings import Settings
from stoker.runtime.spec import FunctionSpec
from stoker.runtime.worker.engine_link import see
from stoker.runtime.worker.host import Host, log_path
from stoker.runtime.worker.replica import Replica, Start, StartFailed

BIG = pack("x" * payloads.INLINE_LIMIT)
LEASE_MS = 1000
SPEC = FunctionSpec(name="f", kind="python", version="1")
NEW = Start()


class Holder(Replica):
    """Takes one job at a time and does nothing with it."""

    def __init__(self, host: Host, start: Start = NEW) -> None:
        super().__init__("r", SPEC, host, start)
        self.looked = 0
        self.loops = 0

    async def load(self) -> None:
        self.state = "loading"
        await asyncio.sleep(0.01)

    async def unload(self) -> None:
        pass

    async def take_work(self) -> None:
        self.loops += 1
        if free := await self.room():
            await self.claim(free)

    def free(self) -> int:
        self.looked += 1
        return 1 - len(self.held)

    def abort(self, job_id: str) -> None:
        pass


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    """Without what its claims don't use."""
    server = EmbeddedValkey(tmp_path / "valkey", tmp_path / "s")
    server.start()
    client = connect(server.url)
    bells = Bells(server.url, "w", on_cancel=lambda *_: None)
    await bells.start()
    unused = cast(Any, None)
    broker = Broker(client, lease_ms=LEASE_MS)
    rest = LogBook(client), unused, unused
    yield Host("h", "w", Settings(tmp_path), broker, bells, unused, unused, ["cpu"], unused, *rest, Cluster(client))
    await bells.close()
    await client.aclose()
    server.stop()


async def enqueue(host: Host, job_id: str, payload: bytes) -> None:
    carried = payloads.put(host.store, job_id, payload)
    await host.broker.enqueue(NewJob(id=job_id, function="f", tenant="a", payload=carried))


async def state_of(host: Host, job_id: str) -> JobState:
    job = await host.broker.job(job_id)
    assert job is not None
    return job.state


async def test_small_and_big_payloads_and_one_that_is_gone(host: Host) -> None:
    small, big, gone = ids = [new_job_id("f") for _ in range(3)]
    for job_id, payload in zip(ids, (pack("small"), BIG, BIG), strict=True):
        await enqueue(host, job_id, payload)
    host.store.delete(payloads.object_key(gone))
    replica = Holder(host)
    replica.outbox.start()
    claims = await replica.claim(5)
    assert {claim.job_id: claim.payload for claim in claims} == {small: pack("small"), big: BIG}
    assert replica.held == {claim.job_id: claim for claim in claims}
    await replica.outbox.drained()
    record = await host.broker.job(gone)
    assert record is not None and record.state is JobState.FAILED
    error = unpack(cast(bytes, record.error))
    assert (error["type"], error["code"]) == ("internal_error", "ObjectMissing")
    assert gone in error["message"]
    await replica.outbox.close()


class SlowStore:
    """Reads end when they are told to."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.url = store.url
        self.reading, self.go_on = threading.Event(), threading.Event()

    def read(self, key: str) -> bytes:
        self.reading.set()
        assert self.go_on.wait(20)
        return self._store.read(key)


async def test_a_lease_is_renewed_while_the_payload_is_read(host: Host) -> None:
    job_id = new_job_id("f")
    await enqueue(host, job_id, BIG)
    host.__dict__["store"] = slow = SlowStore(host.store)
    replica = Holder(host)
    claiming = asyncio.create_task(replica.claim(1))
    assert await asyncio.to_thread(slow.reading.wait, 45)
    for _ in range(5):
        fences = {claim.job_id: claim.fence for claim in replica.held.values()}
        assert await host.broker.beat("f", "w", fences) == {}
        await asyncio.sleep(LEASE_MS / 3000)
        assert await host.broker.tick("f") == 0
    slow.go_on.set()
    (claim,) = await claiming
    assert (claim.job_id, claim.payload, replica.held) == (job_id, BIG, {job_id: claim})


async def test_a_job_that_is_lost_while_its_payload_is_read(host: Host) -> None:
    job_id = new_job_id("f")
    await enqueue(host, job_id, BIG)
    host.__dict__["store"] = slow = SlowStore(host.store)
    replica = Holder(host)
    claiming = asyncio.create_task(replica.claim(1))
    assert await asyncio.to_thread(slow.reading.wait, 45)
    replica.lose(job_id)
    slow.go_on.set()
    assert await claiming == [] and replica.held == {}


async def until_ready(replica: Replica) -> None:
    async with asyncio.timeout(45):
        while replica.state != "ready":
            await asyncio.sleep(0.01)


async def test_a_full_replica_waits_for_room_and_claims_nothing(host: Host) -> None:
    replica = Holder(host)
    replica.start()
    await until_ready(replica)
    first, second = new_job_id("f"), new_job_id("f")
    for job_id in (first, second):
        await enqueue(host, job_id, b"p")
    async with asyncio.timeout(45):
        while list(replica.held) != [first]:
            await asyncio.sleep(0.01)
    looked, loops = replica.looked, replica.loops
    await asyncio.sleep(0.1)
    assert replica.looked <= looked + 1 and replica.loops <= loops + 1
    assert await state_of(host, second) is JobState.QUEUED
    replica.complete(replica.held[first], {"value": 1}, {})
    async with asyncio.timeout(45):
        while list(replica.held) != [second]:
            await asyncio.sleep(0.01)
    await replica.stop(0)


async def test_what_comes_to_a_replica_that_leaves_goes_back_unharmed(host: Host) -> None:
    """Its claim stands until the very end; whatever it got is handed back without using up an attempt."""
    replica = Holder(host)
    replica.start()
    await until_ready(replica)
    jobs = [new_job_id("f") for _ in range(5)]
    stopping = asyncio.create_task(replica.stop(0))
    for job_id in jobs:
        await enqueue(host, job_id, b"p")
        await asyncio.sleep(0.002)
    await stopping
    assert replica.state == "gone"
    records = [await host.broker.job(job_id) for job_id in jobs]
    assert all(record and record.attempt == 0 and not record.state.terminal for record in records)
    assert {record.state for record in records if record} <= {JobState.QUEUED, JobState.RETRYING}
    assert [claim.job_id for claim in await host.broker.claim("f", "other", 9)] == jobs


async def test_what_comes_to_a_replica_that_crashed_goes_back_unharmed_and_at_once(host: Host) -> None:
    """Its claim still stands, and the job is handed to it: that is nobody's attempt and waits for no lease."""
    replica = Holder(host)
    replica.start()
    await until_ready(replica)
    async with asyncio.timeout(45):
        while replica.loops < 2 or replica.claimer._ticket.standing is None:
            await asyncio.sleep(0.005)
    first, second = new_job_id("f"), new_job_id("f")
    replica.crash({"type": "function_error", "message": "exit code 9", "code": "process_died"})
    await enqueue(host, first, b"p")
    await asyncio.wait_for(replica.stop(math.inf), 45)
    await enqueue(host, second, b"p")
    assert replica.state == "failed" and replica.held == {}
    records = [await host.broker.job(job_id) for job_id in (first, second)]
    assert [record and record.attempt for record in records] == [0, 0]
    assert [claim.job_id for claim in await host.broker.claim("f", "other", 9)] == [first, second]


async def test_what_is_claimed_while_a_replica_crashes_goes_back_unharmed(host: Host) -> None:
    job_id = new_job_id("f")
    await enqueue(host, job_id, b"p")
    replica = Holder(host)
    replica.outbox.start()
    claiming = asyncio.create_task(replica.claim(1))
    await asyncio.sleep(0)
    replica.crash({"type": "function_error", "message": "exit code 9", "code": "process_died"})
    assert await claiming == [] and replica.held == {}
    await replica.outbox.drained()
    assert [claim.attempt for claim in await host.broker.claim("f", "other", 9)] == [1]
    await replica.outbox.close()


class Idle(Holder):
    """Has not begun with what it holds."""

    def begun(self, job_id: str) -> bool:
        return False


@pytest.mark.parametrize(("kind", "attempt"), [(Holder, 1), (Idle, 0)])
async def test_a_crash_uses_up_an_attempt_of_what_had_begun(host: Host, kind: type[Holder], attempt: int) -> None:
    job_id = new_job_id("f")
    await enqueue(host, job_id, b"p")
    replica = kind(host)
    replica.start()
    async with asyncio.timeout(45):
        while not replica.held:
            await asyncio.sleep(0.005)
    replica.crash({"type": "function_error", "message": "exit code 9", "code": "process_died"})
    await asyncio.wait_for(replica.stop(math.inf), 45)
    record = await host.broker.job(job_id)
    assert record and record.state is JobState.RETRYING and record.attempt == attempt


async def test_a_result_that_is_being_stored_survives_a_crash(host: Host) -> None:
    job_id = new_job_id("f")
    await enqueue(host, job_id, b"p")
    replica = Holder(host)
    replica.outbox.start()
    (claim,) = await replica.claim(1)
    replica.complete(claim, {"value": "x" * payloads.INLINE_LIMIT}, {})
    replica.crash({"type": "function_error", "message": "exit code 9", "code": "process_died"})
    while replica.held:
        await asyncio.sleep(0.005)
    await replica.outbox.drained()
    assert await state_of(host, job_id) is JobState.SUCCEEDED
    await replica.outbox.close()


async def test_a_start_tells_the_queue_how_long_it_took(host: Host) -> None:
    replica = Holder(host)
    replica.start()
    await until_ready(replica)
    await replica.stop(0)
    await host.broker.set_limits("f", Limits(max_queued=1))
    await enqueue(host, new_job_id("f"), b"p")
    took_s = (replica._ready_at - replica._started_at) / 1e9
    with pytest.raises(QueueFull) as refused:
        await enqueue(host, new_job_id("f"), b"p")
    assert abs(refused.value.retry_after_s - (60 + took_s)) <= 0.001


async def test_a_big_result_is_stored_before_the_job_ends(host: Host) -> None:
    job_id = new_job_id("f")
    await enqueue(host, job_id, b"p")
    replica = Holder(host)
    replica.outbox.start()
    (claim,) = await replica.claim(1)
    replica.complete(claim, {"value": "x" * payloads.INLINE_LIMIT}, {})
    assert replica.held
    while replica.held:
        await asyncio.sleep(0.005)
    await replica.outbox.drained()
    job = await host.broker.job(job_id)
    assert job and job.state is JobState.SUCCEEDED and job.result and len(job.result) < 100
    assert unpack(payloads.get_result(host.store, job_id, job.result)) == {"value": "x" * payloads.INLINE_LIMIT}
    await replica.outbox.close()


async def test_a_result_that_can_not_be_stored_is_tried_again(host: Host, tmp_path: Path) -> None:
    job_id = new_job_id("f")
    await enqueue(host, job_id, b"p")
    (tmp_path / "file").write_bytes(b"")
    host.__dict__["store"] = open_store((tmp_path / "file").as_uri())
    replica = Holder(host)
    replica.outbox.start()
    (claim,) = await replica.claim(1)
    replica.complete(claim, {"value": "x" * payloads.INLINE_LIMIT}, {})
    while replica.held:
        await asyncio.sleep(0.005)
    await replica.outbox.drained()
    job = await host.broker.job(job_id)
    assert job and job.state is JobState.RETRYING and job.attempt == 1
    await replica.outbox.close()


async def test_a_late_verdict_does_not_touch_the_next_attempt(host: Host) -> None:
    job_id = new_job_id("f")
    await enqueue(host, job_id, b"p")
    replica = Holder(host)
    (claim,) = await replica.claim(1)
    replica.lose(job_id)
    replica.hold(claim._replace(fence=claim.fence + 1))
    replica.complete(claim, {"value": 1}, {})
    replica.fail(claim, {"message": "late"}, retry=True)
    assert replica.held[job_id].fence == claim.fence + 1


def test_a_log_is_named_without_the_hosts_folders(tmp_path: Path) -> None:
    path = log_path(Settings(tmp_path), "h", "f-1")
    assert see(path) == "see logs/h-f-1.log in the worker's data folder"


class Broken(Holder):
    """Takes a job, as a model does while its weights arrive, and fails to start after all."""

    async def load(self) -> None:
        await self.claim(1)
        raise StartFailed({"type": "cold_start_error", "message": "shard 2 is missing", "code": "ObjectMissing"})


@pytest.mark.parametrize("relieves", [True, False])
async def test_a_failed_start_leaves_its_jobs_to_another_version_if_there_is_one(host: Host, relieves: bool) -> None:
    taken, waiting = new_job_id("f"), new_job_id("f")
    for job_id in (taken, waiting):
        await enqueue(host, job_id, b"p")
    replica = Broken(host, Start(failed_before=7, relieves=relieves))
    replica.start()
    async with asyncio.timeout(45):
        while replica.state != "failed" or replica.held:
            await asyncio.sleep(0.01)
    await replica.outbox.drained()
    states = [await state_of(host, job_id) for job_id in (taken, waiting)]
    assert states == ([JobState.RETRYING, JobState.QUEUED] if relieves else [JobState.FAILED] * 2)
    claims = await host.broker.claim("f", "older version", 5)
    assert [(claim.job_id, claim.attempt) for claim in claims] == ([(taken, 1), (waiting, 1)] if relieves else [])
    await replica.stop(0)
