import asyncio
import time
from dataclasses import replace

import httpx
import pytest

from stoker.queue.broker import Broker
from stoker.queue.cluster import Cluster
from stoker.queue.records import Backlog, Completion, Job, JobState, pack
from stoker.runtime.gateway.eta import eta_s

from .peers import PATIENCE_S, Deploy
from .test_job_routes import queue_job

WAITING = Job(
    **{"id": "f-1", "function": "f", "tenant": "t", "state": JobState.QUEUED, "attempt": 0, "max_attempts": 3},
    **{"priority": 1, "stream": False, "enqueued_ms": 0, "started_ms": None, "finished_ms": None, "worker": ""},
    **{"reason": "", "error": None, "result": None, "usage": None, "notes": None, "queued_ahead": 9},
)
BACKLOG = Backlog("f", 10, 0, 0, 0, 5.0, 1.0, 0, drained_last_per_s=2.0, cold_start_ms=8000)
READY = {"function": "f", "state": "ready"}


def loading(share: float) -> dict[str, object]:
    return {"function": "f", "state": "loading", "loaded_bytes": int(share * 1000), "total_bytes": 1000}


def test_with_a_worker_at_the_present_rate() -> None:
    assert eta_s(WAITING, BACKLOG, [READY]) == 2.0
    assert eta_s(WAITING, replace(BACKLOG, drained_per_s=0.0), [READY]) == 5.0


def test_without_one_it_starts_first() -> None:
    assert eta_s(WAITING, BACKLOG, []) == 8.0 + 4.5
    assert eta_s(WAITING, BACKLOG, [loading(0.75), loading(0.5)]) == 2.0 + 4.5
    first = replace(WAITING, queued_ahead=0)
    assert eta_s(first, replace(BACKLOG, drained_last_per_s=0.0), []) == 8.0


def test_a_start_that_has_begun_takes_what_the_controller_says_is_left() -> None:
    left = {"code": "loading", "message": "a replica is starting, about 3 s left", "eta_s": 3.0}
    assert eta_s(WAITING, BACKLOG, [loading(0.0)], left) == 3.0 + 4.5
    assert eta_s(WAITING, BACKLOG, [loading(0.0)], {**left, "eta_s": 0.0}) == 4.5
    assert eta_s(WAITING, BACKLOG, [loading(0.5)], {**left, "code": "no_capacity"}) == 4.0 + 4.5
    assert eta_s(WAITING, BACKLOG, [READY], left) == 2.0
    assert eta_s(WAITING, replace(BACKLOG, cold_start_ms=None), [], left) is None


@pytest.mark.parametrize(
    "case",
    [
        (replace(WAITING, queued_ahead=None), BACKLOG, [READY]),
        (WAITING, None, [READY]),
        (WAITING, replace(BACKLOG, cold_start_ms=None), []),
        (WAITING, replace(BACKLOG, drained_per_s=0.0, drained_last_per_s=0.0), [READY]),
    ],
)
def test_what_is_not_known_is_not_guessed(case: tuple) -> None:
    assert eta_s(*case) is None


def test_a_function_that_does_not_start_has_none() -> None:
    assert eta_s(WAITING, BACKLOG, [], failing=True) is None


async def drain(broker: Broker, name: str) -> None:
    """One job after the other."""
    while True:
        for claim in await broker.claim(name, "w", 1):
            await asyncio.sleep(0.02)
            await broker.done(name, [Completion(claim.job_id, claim.fence, pack({"value": 1}), pack({}))])


async def test_a_queue_that_drains_steadily_keeps_its_word(
    http: httpx.AsyncClient, broker: Broker, cluster: Cluster, deploy: Deploy
) -> None:
    name = await deploy()
    replica = {"function": name, "version": "", "state": "ready", "loaded_bytes": 0, "total_bytes": 0, "inflight": 1}
    body = {"id": "h9", "pid": 1, "started_ms": 1, "device": "cpu", "replicas": {"r": {**replica, "error": None}}}
    ids = [await queue_job(http, name) for _ in range(150)]
    draining = asyncio.create_task(drain(broker, name))
    await asyncio.sleep(1.2)
    await cluster.report_host("h9", body)
    said = None
    async with asyncio.timeout(PATIENCE_S):
        while said is None:
            said = (await http.get(f"/v1/jobs/{ids[-1]}")).json()["eta_s"]
    asked = time.time()
    async with asyncio.timeout(30):
        while not (began := (await http.get(f"/v1/jobs/{ids[-1]}")).json()["started_at"]):
            await asyncio.sleep(0.02)
    draining.cancel()
    await asyncio.gather(draining, return_exceptions=True)
    await cluster.forget_host("h9")
    assert 0.4 < said / (began - asked) < 2.5
