"""Inputs above 64 KiB: the queue gets a reference, the worker reads the object."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from redis.asyncio import Redis

from stoker.coldstart.store import ObjectStore
from stoker.queue import keys
from stoker.queue.broker import Broker
from stoker.queue.records import Claim, Completion, Limits, pack, unpack
from stoker.runtime import payloads

from .conftest import RunningGateway, running
from .peers import Deploy, error_of

BIG = "x" * 100_000


async def claimed(broker: Broker, store: ObjectStore, name: str) -> tuple[Claim, object]:
    (claim,) = await broker.claim(name, "w", 1)
    return claim, unpack(payloads.get(store, claim.job_id, claim.payload))


def stored(store: ObjectStore, name: str) -> list[str | None]:
    return [payloads.job_of(found.key) for found in store.list(f"{payloads.PREFIX}{name}/")]


async def test_the_queue_carries_a_reference(
    http: httpx.AsyncClient, redis: Redis, broker: Broker, store: ObjectStore, deploy: Deploy
) -> None:
    name = await deploy()
    job_id = (await http.post(f"/v1/functions/{name}/jobs", json=BIG)).json()["id"]
    carried = await redis.get(keys.key(name, f"p:{job_id}"))
    assert len(carried) < 100
    assert stored(store, name) == [job_id]
    claim, payload = await claimed(broker, store, name)
    assert (claim.job_id, payload["kind"], payload["input"]) == (job_id, "call", BIG)


async def test_what_was_not_queued_is_not_kept(
    http: httpx.AsyncClient, broker: Broker, store: ObjectStore, deploy: Deploy
) -> None:
    name = await deploy()
    headers = {"idempotency-key": "k"}
    first = await http.post(f"/v1/functions/{name}/jobs", json=BIG, headers=headers)
    again = await http.post(f"/v1/functions/{name}/jobs", json=BIG, headers=headers)
    assert first.json()["id"] == again.json()["id"]
    other = await http.post(f"/v1/functions/{name}/jobs", json=BIG + "y", headers=headers)
    await broker.set_limits(name, Limits(max_queued=1))
    full = await http.post(f"/v1/functions/{name}/jobs", json=BIG)
    assert (other.status_code, full.status_code) == (409, 429)
    await broker.set_limits(name, Limits())
    for _ in range(200):
        if stored(store, name) == [first.json()["id"]]:
            break
        await http.get("/healthz")
    assert stored(store, name) == [first.json()["id"]]


@pytest.fixture
async def without_store(gateway: RunningGateway, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    (tmp_path / "file").write_bytes(b"")
    settings = replace(gateway.settings, gateway_id="no-store", store_url=(tmp_path / "file").as_uri())
    with running(settings) as other:
        async with httpx.AsyncClient(base_url=other.url, timeout=20) as client:
            yield client


async def test_a_store_that_is_away_is_a_503(without_store: httpx.AsyncClient, broker: Broker, deploy: Deploy) -> None:
    name = await deploy()
    refused = await without_store.post(f"/v1/functions/{name}/jobs", json=BIG)
    assert (refused.status_code, error_of(refused)["code"]) == (503, "store_unavailable")
    assert (await broker.backlogs([name]))[name].queued == 0
    assert (await without_store.post(f"/v1/functions/{name}/jobs", json="small")).status_code == 202


async def test_a_big_result_is_read_from_the_store(
    http: httpx.AsyncClient, broker: Broker, store: ObjectStore, deploy: Deploy
) -> None:
    """By who waits for it, by who follows the job, and by who asks for it later."""
    name, result = await deploy(), pack({"value": BIG})
    waiting = asyncio.create_task(http.post(f"/v1/functions/{name}", json=1))
    streaming = asyncio.create_task(http.post(f"/v1/functions/{name}", json=1, headers={"accept": "text/event-stream"}))
    for _ in range(2):
        while not (claims := await broker.claim(name, "w", 1)):
            await asyncio.sleep(0.01)
        carried = payloads.put_result(store, claims[0].job_id, claims[0].fence, result)
        await broker.done(name, [Completion(claims[0].job_id, claims[0].fence, carried, b"")])
    answer = await waiting
    assert (answer.status_code, answer.json()) == (200, BIG)
    assert BIG in (await streaming).text
    job_id = answer.headers["x-job-id"]
    assert (await http.get(f"/v1/jobs/{job_id}")).json()["result"] == BIG
    for found in list(store.list(f"{payloads.RESULTS}{name}/")):
        store.delete(found.key)
    missing = await http.get(f"/v1/jobs/{job_id}")
    assert (missing.status_code, error_of(missing)["code"]) == (503, "store_unavailable")
