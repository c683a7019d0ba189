"""SIGKILL, and SIGSTOP past the lease, of every process while jobs are at every step of their life: some are just being
sent, some wait, some run, some end. Each ends once, with all it said in order, and nothing is left over."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import httpx
import psutil
import pytest
import redis

from stoker.queue.broker import Broker
from stoker.queue.client import connect
from stoker.queue.records import Job, JobState, StoredChunk, unpack
from stoker.queue.retry import insist
from stoker.runtime.local import LocalStack
from tests.children import descendants
from tests.queue.queue_oracle import attempts, counters, expiry, one_place, payloads, ready_lanes, snapshot

T = TypeVar("T")

pytestmark = pytest.mark.xdist_group("every_process")

LEASE_MS = 1500
VALUES, BEFORE, MEANWHILE = 8, 8, 4
PATIENCE_S = 60.0
APP = f"""
import time
import stoker

app = stoker.App("walks")


@app.function(concurrency=3, retries=19)
def walk(name):
    for number in range({VALUES}):
        time.sleep(0.05)
        yield number
"""
VICTIMS = {
    "agent": "worker --host-id",
    "function": "stoker-function",
    "gateway": "stoker.runtime.cli gateway",
    "controller": "stoker.runtime.cli controller",
    "server": "valkey-server",
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    folder = tmp_path_factory.mktemp("walks")
    (folder / "walks.py").write_text(APP)
    with LocalStack(folder / "data", env={"STOKER_LEASE_MS": str(LEASE_MS)}) as stack:
        stack.deploy(folder / "walks.py")
        yield stack


class Sender(threading.Thread):
    """Puts jobs under ids of its own, one after another, each until the gateway has confirmed it."""

    def __init__(self, url: str, names: list[str]) -> None:
        super().__init__(daemon=True)
        self.ids: list[str] = []
        self._url = url
        self._names = names
        self.start()

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=10) as http:
            for name in self._names:
                self.ids.append(self._put(http, name))

    def _put(self, http: httpx.Client, name: str) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                answer = http.put(f"/v1/functions/walk/jobs/{name}", json=name)
                if answer.status_code == 202:
                    return answer.json()["id"]
            assert time.monotonic() < deadline, f"{name} was never accepted"
            time.sleep(0.05)

    def sent(self) -> list[str]:
        self.join(PATIENCE_S)
        assert len(set(self.ids)) == len(self._names)
        return self.ids


class Watcher:
    """Looks at jobs through the queue, whoever else is away."""

    def __init__(self, url: str) -> None:
        self._url = url

    def jobs(self, ids: list[str]) -> list[Job]:
        found = asyncio.run(self._ask(Broker.job, ids))
        return [job for job in found if job is not None]

    def chunks(self, ids: list[str]) -> list[list[StoredChunk]]:
        return asyncio.run(self._ask(Broker.chunks, ids))

    async def _ask(self, question: Callable[[Broker, str], Awaitable[T]], ids: list[str]) -> list[T]:
        client = connect(self._url)
        broker = Broker(client)
        try:
            return [await insist(lambda job_id=job_id: question(broker, job_id), PATIENCE_S) for job_id in ids]
        finally:
            await client.aclose()


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"gave up waiting for {what}"
        time.sleep(0.02)


def at_every_step(jobs: list[Job]) -> bool:
    """Some have ended, some run and some wait."""
    states = {job.state for job in jobs}
    return {JobState.SUCCEEDED, JobState.RUNNING} <= states and bool({JobState.QUEUED, JobState.RETRYING} & states)


def strike(victim: psutil.Process, number: signal.Signals) -> None:
    os.kill(victim.pid, number)
    if number is signal.SIGSTOP:
        time.sleep(LEASE_MS / 1000 * 1.5)
        # It may have been given up for dead, and killed, meanwhile.
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGCONT)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_every_job_ends_once_when_each_process_is(number: signal.Signals, stack: LocalStack) -> None:
    watcher, ids = Watcher(stack.redis_url), list[str]()
    for name, marker in VICTIMS.items():
        names = [f"{name}-{number.name}-{i}" for i in range(BEFORE + MEANWHILE)]
        ids += Sender(stack.url, names[:BEFORE]).sent()
        until(lambda ids=ids: at_every_step(watcher.jobs(ids)), f"jobs at every step before {name} is struck")
        until(lambda marker=marker: len(descendants(stack.pid, marker)) == 1, f"one {name}")
        meanwhile = Sender(stack.url, names[BEFORE:])
        strike(descendants(stack.pid, marker)[0], number)
        ids += meanwhile.sent()
    until(lambda: all(job.state.terminal for job in watcher.jobs(ids)), "all jobs to end")
    check(stack, watcher, ids)


def check(stack: LocalStack, watcher: Watcher, ids: list[str]) -> None:
    jobs = watcher.jobs(ids)
    assert [job.id for job in jobs] == ids
    for job, chunks in zip(jobs, watcher.chunks(ids), strict=True):
        assert job.state is JobState.SUCCEEDED, job
        last = [unpack(chunk.data)["value"] for chunk in chunks if chunk.attempt == job.attempt]
        assert last == list(range(VALUES)), job
        assert [chunk.fence for chunk in chunks] == sorted(chunk.fence for chunk in chunks)
    with redis.Redis.from_url(stack.redis_url) as raw:
        shot = snapshot(raw, "walk")
    problems = [
        problem for rule in (one_place, counters, ready_lanes, attempts, expiry, payloads) for problem in rule(shot)
    ]
    assert not problems
    assert Counter(row["job"] for row in shot.usage if row["job"] in set(ids)) == Counter(ids)
    assert not any((shot.lanes, shot.tenant_lanes, shot.ready, shot.waiting, shot.running, any(shot.zsets.values())))
