"""Workers and the server are killed again and again while jobs flow: each job ends once and is accounted for once.

STOKER_LONG_FAULTS=1 runs it ten times as long.
"""

import asyncio
import os
import random
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import redis

from stoker.queue.broker import Broker
from stoker.queue.embedded import EmbeddedValkey
from stoker.queue.records import NewJob, new_job_id
from stoker.queue.retry import insist
from tests.faults.queue.conftest import Spawn, kill, kill_and_restart
from tests.faults.queue.worker_process import work
from tests.queue.queue_oracle import Oracle

ROUNDS = 10 if os.environ.get("STOKER_LONG_FAULTS") else 1
JOBS, WORKER_KILLS, SERVER_KILLS = 2000 * ROUNDS, 40 * ROUNDS, 10 * ROUNDS
WORKERS = 4
LEASE_MS = 800
PATIENCE_S = 60


@pytest.fixture
def binary() -> Path | None:
    return None


class Crew:
    """Four workers, as long as it lasts."""

    def __init__(self, spawn: Spawn, url: str) -> None:
        self._spawn, self._url, self._lives = spawn, url, 0
        self.workers: list[BaseProcess] = [self._start() for _ in range(WORKERS)]

    def _start(self) -> BaseProcess:
        self._lives += 1
        return self._spawn(work, self._url, f"w{self._lives}", LEASE_MS)

    def kill_one(self) -> None:
        i = random.randrange(WORKERS)
        kill(self.workers[i])
        self.workers[i] = self._start()


async def produce(broker: Broker, jobs: list[NewJob], pause_s: float) -> None:
    for new in jobs:
        await insist(lambda new=new: broker.enqueue(new), PATIENCE_S)
        await asyncio.sleep(pause_s)


async def tick_forever(broker: Broker) -> None:
    while True:
        await insist(lambda: broker.tick("f"), PATIENCE_S)
        await asyncio.sleep(0.1)


async def kill_at_random(crew: Crew, server: EmbeddedValkey) -> None:
    victims = ["worker"] * WORKER_KILLS + ["server"] * SERVER_KILLS
    random.shuffle(victims)
    for victim in victims:
        await asyncio.sleep(random.uniform(0.05, 0.35))
        if victim == "worker":
            await asyncio.to_thread(crew.kill_one)
        else:
            await asyncio.to_thread(kill_and_restart, server)


async def finished(broker: Broker) -> None:
    while True:
        log = (await insist(lambda: broker.backlogs(["f"]), PATIENCE_S))["f"]
        if not (log.queued or log.running or log.delayed):
            return
        await asyncio.sleep(0.1)


@pytest.mark.timeout(180 * ROUNDS)
async def test_every_job_ends_once_and_is_charged_once(
    server: EmbeddedValkey, broker: Broker, raw: redis.Redis, spawn: Spawn
) -> None:
    jobs = [
        NewJob(
            id=new_job_id("f"),
            function="f",
            tenant=f"t{i % 7}",
            payload=b"x" * 300,
            priority=i % 3,
            max_attempts=100,
            stream=i % 2 == 0,
            idempotency_key=f"k{i}",
        )
        for i in range(JOBS)
    ]
    crew = Crew(spawn, server.url)
    ticker = asyncio.create_task(tick_forever(broker))
    async with asyncio.timeout(120 * ROUNDS), asyncio.TaskGroup() as group:
        group.create_task(produce(broker, jobs, 0.004))
        group.create_task(kill_at_random(crew, server))
    async with asyncio.timeout(60):
        await finished(broker)
    ticker.cancel()
    check(raw, jobs)


def check(raw: redis.Redis, jobs: list[NewJob]) -> None:
    oracle = Oracle(raw)
    shot = oracle.check("f")
    oracle.close()
    assert Counter(row["state"] for row in shot.jobs.values()) == {"succeeded": len(jobs)}
    assert Counter(row["job"] for row in shot.usage) == Counter(new.id for new in jobs)
    assert not any((shot.lanes, shot.tenant_lanes, shot.ready, shot.waiting, any(shot.zsets.values())))
    retried = sum(int(row["attempt"]) > 1 for row in shot.jobs.values())
    assert retried >= WORKER_KILLS / 10, "the kills hit nobody"
