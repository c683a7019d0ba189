"""A replica and jobs that were made for another version than its own."""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker.queue import keys
from stoker.queue.broker import Broker
from stoker.queue.cluster import Change
from stoker.queue.records import Job, JobState, NewJob, new_job_id, pack, unpack
from stoker.runtime.contract import contract_of
from stoker.runtime.releases import release_of
from stoker.runtime.spec import FunctionSpec
from stoker.runtime.tenancy.vault import Vault
from stoker.runtime.worker import set_aside
from stoker.runtime.worker.function_replica import FunctionReplica
from stoker.runtime.worker.host import Host
from stoker.runtime.worker.replica import Start
from stoker.runtime.worker.set_aside import verdict_of
from stoker.runtime.worker.zygote_link import ZygoteLink
from tests.runtime.worker.test_replica import host, until_ready

__all__ = ["host"]

CODE = """
def add(x, y=1):
    return x + y

def triple(x, y=1, z=1):
    return x + y + z

def whole(x):
    return x
"""
OLD = FunctionSpec(name="f", kind="python", app="a", version="old", code="0" * 64, entry="adding:add", takes="{x, y?}")
NEW = replace(OLD, version="new", entry="adding:triple", takes="{x, y?, z?}")
WHOLE = replace(OLD, entry="adding:whole", takes="value")


@pytest.fixture
async def worker(host: Host, tmp_path: Path) -> AsyncIterator[Host]:
    folder = host.settings.data_dir / "bundles" / OLD.code
    folder.mkdir(parents=True)
    (folder / "adding.py").write_text(CODE)
    host.zygote = ZygoteLink(tmp_path / "zygote.log")
    host.vault = Vault(host.broker._redis, "")
    # Nobody renews leases here.
    host.broker = Broker(host.broker._redis, lease_ms=60_000)
    yield host
    await host.zygote.close()


async def started(worker: Host, spec: FunctionSpec) -> FunctionReplica:
    replica = FunctionReplica(f"r-{spec.version}", spec, worker, Start())
    replica.start()
    await until_ready(replica)
    return replica


async def deploy(worker: Host, spec: FunctionSpec) -> None:
    await worker.cluster.put_function("f", spec.to_dict())


async def release(worker: Host, spec: FunctionSpec) -> None:
    kept = release_of([spec], now=1.0, by="")
    change = Change({spec.name: spec.to_dict()}, releases={kept.version: kept.to_dict()})
    await worker.cluster.change_functions("a", lambda *_: change)


async def enqueue(worker: Host, spec: FunctionSpec, value: Any, run_within_ms: int = 0) -> str:
    """As a gateway does that knows this version."""
    job_id, payload = new_job_id("f"), pack({"for": contract_of(spec), "input": value})
    await worker.broker.enqueue(
        NewJob(id=job_id, function="f", tenant="a", payload=payload, run_within_ms=run_within_ms)
    )
    return job_id


async def job_of(worker: Host, job_id: str) -> Job:
    job = await worker.broker.job(job_id)
    assert job is not None
    return job


async def ended(worker: Host, job_id: str) -> Job:
    async with asyncio.timeout(45):
        while not (job := await job_of(worker, job_id)).state.terminal:
            await asyncio.sleep(0.01)
    return job


async def kept(replica: FunctionReplica, *job_ids: str) -> None:
    """And readers are told so."""
    async with asyncio.timeout(45):
        while not replica.aside.fences().keys() >= set(job_ids):
            await asyncio.sleep(0.005)
        while not all([(await replica.host.broker.job(job_id)).aside for job_id in job_ids]):  # type: ignore[union-attr]
            await asyncio.sleep(0.005)


def value_of(job: Job) -> Any:
    assert job.state is JobState.SUCCEEDED and job.result is not None, job.error and unpack(job.error)
    return unpack(job.result)["value"]


def error_of(job: Job) -> dict[str, Any]:
    assert job.state is JobState.FAILED and job.error is not None
    return unpack(job.error)


async def stop(*replicas: FunctionReplica) -> None:
    for replica in replicas:
        await asyncio.wait_for(replica.stop(math.inf), 45)


async def test_what_only_the_newer_version_takes_waits_for_it_and_costs_no_attempt(worker: Host) -> None:
    old = await started(worker, OLD)
    await deploy(worker, NEW)
    more = await enqueue(worker, NEW, {"x": 1, "y": 2, "z": 3})
    await kept(old, more)
    # Its neighbours don't wait, whichever version they were made for.
    assert value_of(await ended(worker, await enqueue(worker, NEW, {"x": 1, "y": 2}))) == 3
    assert value_of(await ended(worker, await enqueue(worker, OLD, {"x": 1}))) == 2
    shown = await job_of(worker, more)
    assert (shown.state, shown.aside) == (JobState.QUEUED, True) and old.held == {}
    new = await started(worker, NEW)
    await stop(old)
    job = await ended(worker, more)
    assert value_of(job) == 6 and job.attempt == 1
    assert [attempt.how for attempt in job.past_attempts] == ["handed_back"]
    await stop(new)


async def test_fields_are_not_taken_for_a_value(worker: Host) -> None:
    """{"x": 1} is a value too, but it was not made for one."""
    old = await started(worker, WHOLE)
    await deploy(worker, NEW)
    job_id = await enqueue(worker, NEW, {"x": 1})
    await kept(old, job_id)
    new = await started(worker, NEW)
    await stop(old)
    assert value_of(await ended(worker, job_id)) == 3
    await stop(new)


async def test_what_was_made_for_a_version_that_is_gone_says_how_it_still_can_run(worker: Host) -> None:
    await release(worker, NEW)
    gone = await enqueue(worker, NEW, {"x": 1, "z": 1})
    unkept = await enqueue(worker, WHOLE, {"x": 1})
    fits = await enqueue(worker, NEW, {"x": 1})
    # Rolled back before it was ready.
    await release(worker, OLD)
    old = await started(worker, OLD)
    assert value_of(await ended(worker, fits)) == 2
    error = error_of(await ended(worker, gone))
    assert error["code"] == "version_changed" and "'z'" in error["message"]
    assert "accepted for version new, and version old, which serves now" in error["message"]
    assert f"`stoker rollback a new`, then `stoker jobs replay {gone}`" in error["message"]
    error = error_of(await ended(worker, unkept))
    assert error["code"] == "version_changed" and "rollback" not in error["message"]
    assert "accepted for another version, which is no longer kept, and version old" in error["message"]
    await stop(old)
    await release(worker, NEW)
    new = await started(worker, NEW)
    await worker.broker.replay(gone)
    assert value_of(await ended(worker, gone)) == 3
    await stop(new)


async def test_own_misfits_are_refused_at_once(worker: Host) -> None:
    old = await started(worker, OLD)
    await deploy(worker, NEW)
    assert error_of(await ended(worker, await enqueue(worker, OLD, {"z": 1})))["code"] == "invalid_input"
    await stop(old)


async def test_a_version_that_does_not_start_is_named_to_those_who_wait_for_it(
    worker: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(set_aside, "FAILING_S", 0.0)
    old = await started(worker, OLD)
    await deploy(worker, NEW)
    job_id = await enqueue(worker, NEW, {"x": 1, "z": 1})
    await kept(old, job_id)
    told = {"version": "new", "serving": "old", "error": "no module named x"}
    await worker.cluster.report_fleet({"rollouts": {"f": told}})
    error = error_of(await ended(worker, job_id))
    assert error["code"] == "version_failed" and "version new" in error["message"]
    assert "no module named x" in error["message"]
    await stop(old)


async def test_a_time_limit_of_a_run_is_none_of_the_wait(worker: Host) -> None:
    """However long that is: it is not handed back and forth, which would use up its attempts."""
    old = await started(worker, OLD)
    await deploy(worker, NEW)
    job_id = await enqueue(worker, NEW, {"x": 1, "z": 1}, run_within_ms=3_000)
    await kept(old, job_id)
    limits = keys.key("f", "dl")
    assert await worker.broker._redis.zcard(limits) == 0
    job = await job_of(worker, job_id)
    assert job.state is JobState.QUEUED and job.past_attempts == []
    await stop(old)
    (claim,) = await worker.broker.claim("f", "other", 1)
    assert (claim.job_id, claim.attempt) == (job_id, 1)
    assert await worker.broker._redis.zcard(limits) == 1


async def test_a_cancelled_one_is_let_go_with_what_it_had_used(worker: Host) -> None:
    old = await started(worker, OLD)
    await deploy(worker, NEW)
    job_id = await enqueue(worker, NEW, {"x": 1, "z": 1})
    await kept(old, job_id)
    await worker.broker.cancel(job_id)
    old.lose(job_id, "cancelled")
    assert old.aside.fences() == {}
    await stop(old)
    job = await job_of(worker, job_id)
    assert job.state is JobState.CANCELLED and job.metered


async def test_a_replica_that_keeps_many_claims_no_more(worker: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_aside, "MOST_ASIDE", 2)
    old = await started(worker, OLD)
    await deploy(worker, NEW)
    ids = [await enqueue(worker, NEW, {"x": 1, "z": 1}) for _ in range(2)]
    await kept(old, *ids)
    later = await enqueue(worker, OLD, {"x": 1})
    claims = []
    async with asyncio.timeout(45):
        while not claims:
            claims = await worker.broker.claim("f", "other", 1)
            await asyncio.sleep(0.01)
    assert [claim.job_id for claim in claims] == [later]
    await stop(old)
    assert {claim.job_id for claim in await worker.broker.claim("f", "other", 2)} == set(ids)


@pytest.mark.parametrize(
    ("deployed", "rollout", "verdict"),
    [
        ("mine", {}, "refuse"),
        ("mine", {"version": "mine"}, "refuse"),
        ("next", {}, "wait"),
        ("next", {"version": "next"}, "failing"),
        ("next", {"version": "earlier"}, "wait"),
        ("", {}, "wait"),
    ],
)
def test_what_becomes_of_those_that_wait(deployed: str, rollout: dict[str, str], verdict: str) -> None:
    assert verdict_of("mine", deployed, rollout) == verdict
