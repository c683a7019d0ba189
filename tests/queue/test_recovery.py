"""The server is killed while jobs flow: everything accepted still ends, once."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from queue_oracle import Oracle

from stoker.queue import keys
from stoker.queue.broker import Broker
from stoker.queue.client import connect
from stoker.queue.embedded import EmbeddedValkey
from stoker.queue.events import Bells, EventBus
from stoker.queue.records import Claim, Completion, Emission, Failure, JobState, NewJob, Settled, new_job_id
from stoker.queue.retry import insist

PATIENCE_S = 20
CHUNKS = 5


@pytest.fixture
def server(tmp_path: Path, server_binary: Path | None) -> Iterator[EmbeddedValkey]:
    """Its own, to be killed."""
    subject = EmbeddedValkey(tmp_path, binary=server_binary)
    subject.start()
    yield subject
    subject.stop()


def kill_and_restart(server: EmbeddedValkey) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    while server.alive():
        time.sleep(0.001)
    server.start()


def new_job(i: int) -> NewJob:
    return NewJob(
        id=new_job_id("f"),
        function="f",
        tenant=f"t{i % 3}",
        payload=b"x" * 500,
        max_attempts=50,
        stream=i % 2 == 0,
        gateway="gw",
    )


class Worker:
    """Claims, streams and finishes jobs; now and then it fails one, or dies with all it has."""

    def __init__(self, broker: Broker, bells: Bells, name: str, stop: asyncio.Event) -> None:
        self.broker, self.bells, self.stop, self.name = broker, bells, stop, name
        self.random = random.Random(name)
        self.lives = 0

    async def run(self) -> None:
        while not self.stop.is_set():
            claims = await insist(lambda: self.broker.claim("f", f"{self.name}.{self.lives}", 8), PATIENCE_S)
            if not claims:
                await self.bells.wait("f", 0.05)
            elif self.random.random() < 0.1:
                self.lives += 1
            else:
                await self.work(claims)

    async def work(self, claims: list[Claim]) -> None:
        for seq in range(1, CHUNKS + 1):
            emissions = [Emission(claim.job_id, claim.fence, seq, b"%d" % seq) for claim in claims if claim.stream]
            await insist(lambda emissions=emissions: self.broker.emit("f", emissions), PATIENCE_S)
            await asyncio.sleep(0.001)
        failed = [Failure(claims[0].job_id, claims[0].fence, b"e", retry=True)] if self.random.random() < 0.2 else []
        good = [Completion(claim.job_id, claim.fence, b"r", b"u") for claim in claims[len(failed) :]]
        assert Settled.DEAD not in await insist(lambda: self.broker.fail("f", failed), PATIENCE_S)
        await insist(lambda: self.broker.done("f", good), PATIENCE_S)


async def watch(bus: EventBus, broker: Broker, new: NewJob) -> list[bytes]:
    """What a client of a gateway would see: the chunks of the last attempt, and one end."""
    chunks: list[bytes] = []
    async with bus.watch(new.id) as subscription:
        await insist(lambda: broker.enqueue(new), PATIENCE_S)
        async for event in subscription:
            if event.kind == "end":
                assert event.state is JobState.SUCCEEDED
            chunks = [*chunks, event.data] if event.kind == "chunk" else chunks if event.kind == "end" else []
    return chunks


async def test_server_and_workers_die_while_jobs_flow(server: EmbeddedValkey) -> None:
    client = connect(server.url)
    broker = Broker(client, lease_ms=400, backoff_base_ms=5, backoff_cap_ms=20)
    bus = EventBus(server.url, broker, "gw", level_s=0.5)
    bells = Bells(server.url, "w", on_cancel=print)
    await bus.start()
    await bells.start()
    stop = asyncio.Event()
    workers = [asyncio.create_task(Worker(broker, bells, f"w{i}", stop).run()) for i in range(4)]
    ticker = asyncio.create_task(tick_forever(broker, stop))
    jobs = [new_job(i) for i in range(300)]
    watchers = [asyncio.create_task(watch(bus, broker, new)) for new in jobs[:100]]
    for batch in range(100, 300, 50):
        watchers += [asyncio.create_task(watch(bus, broker, new)) for new in jobs[batch : batch + 50]]
        await asyncio.to_thread(kill_and_restart, server)
        await asyncio.sleep(0.1)
    async with asyncio.timeout(60):
        seen = await asyncio.gather(*watchers)
    stop.set()
    await asyncio.gather(*workers, ticker)
    assert seen == [[b"%d" % n for n in range(1, CHUNKS + 1)] if new.stream else [] for new in jobs]
    await bus.close()
    await bells.close()
    await client.aclose()
    check_end_state(server, jobs)


async def tick_forever(broker: Broker, stop: asyncio.Event) -> None:
    while not stop.is_set():
        await insist(lambda: broker.tick("f"), PATIENCE_S)
        await asyncio.sleep(0.05)


def check_end_state(server: EmbeddedValkey, jobs: list[NewJob]) -> None:
    raw = redis.Redis.from_url(server.url)
    oracle = Oracle(raw)
    for new in jobs:
        raw.hdel(keys.key("f", f"j:{new.id}"), "gates")
    shot = oracle.check("f")
    assert {row["state"] for row in shot.jobs.values()} == {"succeeded"}
    assert Counter(row["job"] for row in shot.usage) == Counter(new.id for new in jobs)
    assert not any((shot.lanes, shot.tenant_lanes, shot.ready, shot.waiting, any(shot.zsets.values())))
    oracle.close()
    raw.close()


async def test_no_end_is_lost_while_the_gateway_is_cut_off(server: EmbeddedValkey) -> None:
    """The server dies after the first chunks; the worker is back, and done, before the gateway."""
    client = connect(server.url)
    broker = Broker(client)
    bus = EventBus(server.url, broker, "gw", level_s=60)
    await bus.start()
    jobs = [new_job(i) for i in range(20)]
    subscriptions = [bus.watch(new.id) for new in jobs]
    for new in jobs:
        await broker.enqueue(new)
    claims = await broker.claim("f", "w", 20)
    await broker.emit("f", [Emission(claim.job_id, claim.fence, 1, b"1") for claim in claims if claim.stream])
    kill_and_restart(server)
    raw = redis.Redis.from_url(server.url)
    assert raw.pubsub_numsub(keys.gateway_channel("gw")) == [(keys.gateway_channel("gw").encode(), 0)]
    raw.close()
    emissions = [Emission(claim.job_id, claim.fence, 2, b"2") for claim in claims if claim.stream]
    await insist(lambda: broker.emit("f", emissions), PATIENCE_S)
    await broker.done("f", [Completion(claim.job_id, claim.fence, b"r", b"u") for claim in claims])
    for new, subscription in zip(jobs, subscriptions, strict=True):
        async with asyncio.timeout(10):
            events = [event async for event in subscription]
        assert [event.data for event in events[:-1]] == ([b"1", b"2"] if new.stream else [])
        assert (events[-1].kind, events[-1].state) == ("end", JobState.SUCCEEDED)
    await bus.close()
    await client.aclose()


async def test_bells_and_leases_survive_a_restart(server: EmbeddedValkey) -> None:
    client = connect(server.url)
    broker = Broker(client)
    bells = Bells(server.url, "w", on_cancel=print)
    await bells.start()
    await broker.enqueue(new_job(0))
    (claim,) = await broker.claim("f", "w", 1)
    while await bells.wait("f", 0.05):
        pass
    kill_and_restart(server)
    assert await bells.wait("f", 5)
    assert await insist(lambda: broker.beat("f", "w", {claim.job_id: claim.fence}), PATIENCE_S) == {}
    waiting = asyncio.create_task(bells.wait("f", 5))
    await broker.enqueue(new_job(1))
    assert await waiting
    await bells.close()
    await client.aclose()
