"""A worker whose claim stands is killed, stopped or cut off: no job is lost, held up or handed to two."""

import asyncio
import os
import signal
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import ConnectionError as RedisConnectionError

from stoker.queue import claimer as claimer_module
from stoker.queue import subscriber
from stoker.queue.broker import Broker
from stoker.queue.claimer import Claimer
from stoker.queue.client import connect
from stoker.queue.embedded import EmbeddedValkey
from stoker.queue.events import Bells
from stoker.queue.records import Completion, JobState
from stoker.queue.scripts import script
from tests.faults.queue.conftest import MakeJob, Spawn, kill, kill_and_restart
from tests.faults.queue.proxy import Proxy
from tests.faults.queue.worker_process import stand
from tests.queue.queue_oracle import Oracle


async def standing(nursery: Any, spawn: Spawn, url: str) -> tuple[BaseProcess, Connection]:
    orders, theirs = nursery.Pipe()
    worker = spawn(stand, url, "w", theirs)
    theirs.close()
    assert await asyncio.to_thread(orders.poll, 20) and orders.recv() == "stands"
    return worker, orders


async def test_a_killed_worker_gets_nothing(
    server: EmbeddedValkey, broker: Broker, oracle: Oracle, nursery: Any, spawn: Spawn, raw: redis.Redis, job: MakeJob
) -> None:
    worker, _ = await standing(nursery, spawn, server.url)
    kill(worker)
    async with asyncio.timeout(20):
        while raw.pubsub_numsub("stoker:handover:w")[0][1]:
            await asyncio.sleep(0.01)
    answer = await broker.enqueue(job())
    assert (answer.state, answer.wake) == (JobState.QUEUED, True)
    (claim,) = await broker.claim("f", "other", 1)
    assert claim.attempt == 1
    oracle.check("f")


async def test_a_stopped_worker_loses_what_it_was_handed(
    server: EmbeddedValkey, broker: Broker, oracle: Oracle, nursery: Any, spawn: Spawn, job: MakeJob
) -> None:
    """And when it comes back, it can't do anything with it."""
    worker, orders = await standing(nursery, spawn, server.url)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    handed, second = job(), job()
    assert (await broker.enqueue(handed)).state is JobState.RUNNING
    assert (await broker.enqueue(second)).state is JobState.QUEUED
    async with asyncio.timeout(20):
        while not await broker.tick("f"):
            await asyncio.sleep(0.05)
    claims = await broker.claim("f", "other", 2)
    assert [(claim.job_id, claim.attempt) for claim in claims] == [(handed.id, 2), (second.id, 1)]
    os.kill(worker.pid, signal.SIGCONT)
    assert await asyncio.to_thread(orders.poll, 20)
    job_id, fence = orders.recv()
    assert job_id == handed.id
    before = oracle.check("f")
    assert await broker.beat("f", "w", {job_id: fence}) == {job_id: "lost"}
    assert [str(answer) for answer in await broker.done("f", [Completion(job_id, fence, b"late", b"")])] == ["stale"]
    assert oracle.check("f") == before


@pytest.mark.parametrize("fault", ["stall", "cut", "server"])
async def test_a_message_that_is_lost_on_its_way(
    server: EmbeddedValkey,
    raw: redis.Redis,
    broker: Broker,
    job: MakeJob,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    """The worker's next claim is answered with the job."""
    monkeypatch.setattr(subscriber, "PING_AFTER_S", 0.1)
    monkeypatch.setattr(subscriber, "DEAD_AFTER_S", 0.3)
    # On a busy machine too, it stands until the job comes.
    monkeypatch.setattr(claimer_module, "STAND_MARGIN_MS", 10_000)
    async with Proxy(tmp_path / "p", server.socket_path).running() as proxy:
        bells = Bells(proxy.url, "w", on_cancel=lambda *_: None)
        await bells.start()
        claimer, new = Claimer(broker, bells, "f", "w", 0.2), job()
        while await claimer.wait():
            pass
        assert await claimer.claim_or_stand(1) == []
        proxy.stall()
        assert (await broker.enqueue(new)).state is JobState.RUNNING
        if fault == "server":
            await asyncio.to_thread(until_written, raw)
            await asyncio.to_thread(kill_and_restart, server)
        if fault != "stall":
            proxy.cut()
        assert await claimer.wait() == []
        proxy.heal()
        (claim,) = await claimer.claim_or_stand(1) if fault != "server" else await reconnected(claimer)
        assert (claim.job_id, claim.attempt) == (new.id, 1)
        await broker.done("f", [Completion(claim.job_id, claim.fence, b"r", b"u")])
        record = await broker.job(new.id)
        assert record and record.state is JobState.SUCCEEDED
        await bells.close()


def until_written(raw: redis.Redis) -> None:
    """A server holds back what it writes for up to two seconds while the disk takes long over an fsync."""
    deadline = time.monotonic() + 20
    while raw.info("persistence")["aof_buffer_length"]:  # type: ignore[index]
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def reconnected(claimer: Claimer) -> list[Any]:
    async with asyncio.timeout(20):
        while True:
            try:
                return await claimer.claim_or_stand(1)
            except RedisConnectionError:
                await asyncio.sleep(0.01)


async def test_a_lost_reply_of_the_enqueue_that_handed_over(
    server: EmbeddedValkey, broker: Broker, oracle: Oracle, job: MakeJob, tmp_path: Path
) -> None:
    bells = Bells(server.url, "w", on_cancel=lambda *_: None)
    await bells.start()
    claimer, earlier, new = Claimer(broker, bells, "f", "w", 5), job(), job()
    await broker.enqueue(earlier)
    await broker.cancel(earlier.id)
    assert await claimer.claim_or_stand(1) == []
    async with Proxy(tmp_path / "p", server.socket_path).running() as proxy:
        client = connect(proxy.url)
        cut_off = Broker(client)
        cut_off._registered.add("f")
        await client.script_load(script("enqueue").source)
        proxy.lose_next_reply()
        with pytest.raises(RedisConnectionError):
            await cut_off.enqueue(new)
        executed = oracle.check("f")
        answer = await cut_off.enqueue(new)
        assert (answer.created, answer.state, answer.wake) == (True, JobState.RUNNING, False)
        assert oracle.check("f") == executed
        await client.aclose()
    claims = []
    while not claims:
        claims = await claimer.wait()
    assert [claim.job_id for claim in claims] == [new.id]
    await bells.close()
