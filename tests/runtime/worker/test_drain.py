"""A replica that drains keeps what it needs until nothing is held, and a host in a hurry can shorten that."""

import asyncio
import math

from stoker.queue.records import JobState, new_job_id
from stoker.runtime.worker.host import Host
from tests.runtime.worker.test_replica import Holder, enqueue, host, state_of

__all__ = ["host"]


class Watched(Holder):
    """Notes what it still held when it was unloaded."""

    held_at_the_end: list[str] | None = None

    async def unload(self) -> None:
        self.held_at_the_end = list(self.held)


async def holding(host: Host) -> tuple[Watched, str]:
    replica, job_id = Watched(host), new_job_id("f")
    await enqueue(host, job_id, b"p")
    replica.start()
    async with asyncio.timeout(45):
        while not replica.held:
            await asyncio.sleep(0.005)
    return replica, job_id


async def test_what_runs_is_finished_before_the_replica_unloads(host: Host) -> None:
    replica, job_id = await holding(host)
    stopping = asyncio.create_task(replica.stop(math.inf))
    await asyncio.sleep(0.1)
    assert replica.state == "draining" and not stopping.done() and replica.held_at_the_end is None
    replica.complete(replica.held[job_id], {"value": 1}, {})
    await asyncio.wait_for(stopping, 45)
    assert replica.state == "gone" and replica.held_at_the_end == []
    assert await state_of(host, job_id) is JobState.SUCCEEDED


async def test_a_second_stop_shortens_the_grace_and_never_lengthens_it(host: Host) -> None:
    replica, job_id = await holding(host)
    patient = asyncio.create_task(replica.stop(math.inf))
    await asyncio.sleep(0.05)
    hasty = asyncio.create_task(replica.stop(0.0))
    late = asyncio.create_task(replica.stop(1000))
    await asyncio.wait_for(asyncio.gather(patient, hasty, late), 45)
    assert replica.state == "gone" and replica.held_at_the_end == []
    record = await host.broker.job(job_id)
    assert record is not None and not record.state.terminal and record.attempt == 0
    assert [claim.job_id for claim in await host.broker.claim("f", "other", 1)] == [job_id]
