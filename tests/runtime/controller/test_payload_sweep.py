"""What the sweep deletes, on a real server and a real store."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from stoker.coldstart.store import open_store
from stoker.queue.broker import Broker
from stoker.queue.records import Completion, Failure, JobState, NewJob, made_at_ms, new_job_id, pack
from stoker.runtime import payloads
from stoker.runtime.controller import payload_sweep
from stoker.runtime.controller.payload_sweep import GRACE_S, needed, sweep

BIG = pack("x" * payloads.INLINE_LIMIT)


@pytest.mark.parametrize("state", [None, *JobState])
def test_a_payload_is_needed_as_long_as_its_job_may_run(state: JobState | None) -> None:
    live = state in (JobState.QUEUED, JobState.RETRYING, JobState.RUNNING, JobState.DEAD, JobState.FAILED)
    job = SimpleNamespace(state=state) if state else None
    assert needed("payloads/f/x", job, 1) is (live or state is None)
    assert needed("payloads/f/x", job, GRACE_S + 1) is live


async def test_only_what_no_job_needs_goes(broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store((tmp_path / "store").as_uri())
    ids = [new_job_id("f") for _ in range(4)]
    done, dead, running, waiting = ids
    for job_id in ids:
        payload = payloads.put(store, job_id, BIG)
        await broker.enqueue(NewJob(id=job_id, function="f", tenant="a", payload=payload, max_attempts=1))
    claims = {claim.job_id: claim for claim in await broker.claim("f", "w", 3)}
    await broker.done("f", [Completion(done, claims[done].fence, b"r", b"u")])
    await broker.fail("f", [Failure(dead, claims[dead].fence, b"e", retry=True)])
    unknown = new_job_id("f")
    payloads.put(store, unknown, BIG)
    store.write("payloads/f/other", b"not a payload")
    store.write("models/weights", b"not a payload")
    assert await sweep(store, broker) == 1
    left = {payloads.job_of(found.key) for found in store.list(payloads.PREFIX)}
    assert left == {dead, running, waiting, unknown, None}
    assert await broker.replay(dead) is JobState.QUEUED
    (again,) = (claim for claim in await broker.claim("f", "w", 2) if claim.job_id == dead)
    assert payloads.get(store, dead, again.payload) == BIG
    for job_id in (dead, running, waiting):
        await broker.cancel(job_id)
    late = time.time() + GRACE_S + 1
    monkeypatch.setattr(payload_sweep.time, "time", lambda: late)
    assert await sweep(store, broker) == 4
    assert {found.key for found in store.list()} == {"payloads/f/other", "models/weights"}
    assert abs(made_at_ms(unknown) / 1000 + GRACE_S - late) < 60


async def test_a_result_goes_with_the_record_of_its_job(broker: Broker, tmp_path: Path) -> None:
    store = open_store((tmp_path / "store").as_uri())
    ids = kept, gone = [new_job_id("f") for _ in range(2)]
    for job_id, retention_ms in zip(ids, (60_000, 20), strict=True):
        job = NewJob(id=job_id, function="f", tenant="a", payload=b"p", retention_ms=retention_ms)
        await broker.enqueue(job)
    for claim in await broker.claim("f", "w", 2):
        carried = payloads.put_result(store, claim.job_id, claim.fence, BIG)
        payloads.put_result(store, claim.job_id, claim.fence - 1, BIG)
        assert await sweep(store, broker) == 0
        await broker.done("f", [Completion(claim.job_id, claim.fence, carried, b"u")])
    while await broker.job(gone):
        await asyncio.sleep(0.005)
    assert await sweep(store, broker) == 2
    assert {payloads.job_of(found.key) for found in store.list()} == {kept}
    job = await broker.job(kept)
    assert job and job.result and payloads.get_result(store, kept, job.result) == BIG
