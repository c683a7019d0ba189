"""A worker is stopped (SIGSTOP) past its lease and comes back (SIGCONT): nothing that it still says counts."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from stoker.queue.broker import Broker
from stoker.queue.embedded import EmbeddedValkey
from stoker.queue.records import Completion, Emission, Failure, JobState, NewJob, Settled
from tests.faults.queue.conftest import MakeJob, Spawn
from tests.faults.queue.worker_process import hold
from tests.queue.queue_oracle import Oracle

LEASE_MS = 500

Meanwhile = Callable[[Broker, NewJob], Awaitable[Any]]


async def nothing(broker: Broker, new: NewJob) -> None:
    pass


async def claimed(broker: Broker, new: NewJob) -> int:
    (claim,) = await broker.claim("f", "other", 1)
    await broker.emit("f", [Emission(new.id, claim.fence, 1, b"second")])
    return claim.fence


async def succeeded(broker: Broker, new: NewJob) -> None:
    await broker.done("f", [Completion(new.id, await claimed(broker, new), b"right", b"usage")])


async def failed(broker: Broker, new: NewJob) -> None:
    await broker.fail("f", [Failure(new.id, await claimed(broker, new), b"wrong", retry=False)])


async def cancelled(broker: Broker, new: NewJob) -> None:
    await broker.cancel(new.id)


@pytest.mark.parametrize(
    ("meanwhile", "state"),
    [
        (nothing, JobState.RETRYING),
        (claimed, JobState.RUNNING),
        (succeeded, JobState.SUCCEEDED),
        (failed, JobState.FAILED),
        (cancelled, JobState.CANCELLED),
    ],
)
async def test_a_stopped_worker_comes_back_too_late(
    server: EmbeddedValkey,
    broker: Broker,
    oracle: Oracle,
    nursery: Any,
    spawn: Spawn,
    job: MakeJob,
    meanwhile: Meanwhile,
    state: JobState,
) -> None:
    new = job()
    await broker.enqueue(new)
    orders, theirs = nursery.Pipe()
    worker = spawn(hold, server.url, "w", LEASE_MS, theirs)
    theirs.close()
    await asyncio.to_thread(orders.recv)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    async with asyncio.timeout(20):
        while not await broker.tick("f"):
            await asyncio.sleep(0.05)
    await meanwhile(broker, new)
    before = oracle.check("f")
    assert before.jobs[new.id]["state"] == state
    orders.send(True)
    os.kill(worker.pid, signal.SIGCONT)
    answers = await asyncio.to_thread(orders.recv)
    assert answers == {
        "emit": [new.id],
        "beat": {new.id: "cancelled" if meanwhile is cancelled else "lost"},
        "done": [Settled.STALE],
        "fail": [Settled.STALE],
    }
    assert oracle.check("f") == before
    orders.send(False)
    await asyncio.to_thread(worker.join, 10)


async def test_progress_after_done_changes_nothing(broker: Broker, oracle: Oracle, job: MakeJob) -> None:
    new = job()
    await broker.enqueue(new)
    (claim,) = await broker.claim("f", "w", 1)
    await broker.done("f", [Completion(new.id, claim.fence, b"right", b"usage")])
    before = oracle.check("f")
    assert await broker.emit("f", [Emission(new.id, claim.fence, 1, b"late")]) == [new.id]
    assert await broker.beat("f", "w", {new.id: claim.fence}) == {new.id: "lost"}
    assert await broker.fail("f", [Failure(new.id, claim.fence, b"late", retry=True)]) == [Settled.DONE]
    assert oracle.check("f") == before
    assert await broker.chunks(new.id) == []
