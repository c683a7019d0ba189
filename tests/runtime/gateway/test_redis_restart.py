"""The queue's server goes away and comes back; the gateway stays."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from stoker.queue.broker import Broker
from stoker.queue.client import connect
from stoker.queue.cluster import Cluster
from stoker.queue.embedded import EmbeddedValkey
from stoker.queue.records import Claim, Completion, Emission, pack
from stoker.queue.retry import insist
from stoker.runtime.gateway.settings import GatewaySettings
from stoker.runtime.spec import FunctionSpec

from .conftest import RunningGateway, running
from .peers import PATIENCE_S, error_of, server_events


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    valkey = EmbeddedValkey(tmp_path / "valkey")
    valkey.start()
    yield valkey
    valkey.stop()


@pytest.fixture
def bereaved(mortal: EmbeddedValkey, settings: GatewaySettings) -> Iterator[RunningGateway]:
    with running(replace(settings, redis_url=mortal.url, gateway_id="gateway-mortal")) as gateway:
        yield gateway


def kill(valkey: EmbeddedValkey) -> None:
    assert valkey.pid
    os.kill(valkey.pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while valkey.alive() and time.monotonic() < deadline:
        time.sleep(0.01)


async def test_a_stream_continues_behind_a_killed_server(bereaved: RunningGateway, mortal: EmbeddedValkey) -> None:
    redis = connect(mortal.url)
    broker = Broker(redis)
    spec = FunctionSpec(name="f", kind="python", code="0" * 64, entry="m:f")
    await Cluster(redis).put_function("f", spec.to_dict())
    async with httpx.AsyncClient(base_url=bereaved.url, timeout=20) as client:
        reading = asyncio.create_task(read_values(client))
        claim = await first_claim(broker)
        await emit(broker, claim, 1)
        await asyncio.sleep(0.2)
        await asyncio.to_thread(kill, mortal)
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/metrics")).status_code == 200
        refused = await client.post("/v1/functions/f/jobs", json=1)
        assert (refused.status_code, error_of(refused)["code"]) == (503, "queue_unavailable")
        assert refused.headers["retry-after"] == "1"
        await asyncio.to_thread(mortal.start)
        await insist(lambda: emit(broker, claim, 2), PATIENCE_S)
        await insist(lambda: finish(broker, claim), PATIENCE_S)
        values, comments = await asyncio.wait_for(reading, PATIENCE_S)
        assert (await client.get("/readyz")).status_code == 200
        assert (await client.post("/v1/functions/f/jobs", json=1)).status_code == 202
    await redis.aclose()
    assert values == ["1", "2", "end"]
    assert "waiting for the queue" in comments


async def first_claim(broker: Broker) -> Claim:
    async with asyncio.timeout(PATIENCE_S):
        while not (claims := await broker.claim("f", "w", 1)):
            await asyncio.sleep(0.01)
    return claims[0]


async def emit(broker: Broker, claim: Claim, number: int) -> None:
    emission = Emission(job_id=claim.job_id, fence=claim.fence, seq=number, data=pack({"value": number}))
    assert not await broker.emit("f", [emission])


async def finish(broker: Broker, claim: Claim) -> None:
    completion = Completion(job_id=claim.job_id, fence=claim.fence, result=pack({"value": None}), usage=pack({}))
    await broker.done("f", [completion])


async def read_values(client: httpx.AsyncClient) -> tuple[list[str], set[str]]:
    values, comments = [], set()
    async with client.stream("POST", "/v1/functions/f", headers={"accept": "text/event-stream"}) as response:
        async for event in server_events(response):
            if event.comment:
                comments.add(event.comment)
            else:
                values.append(event.name or event.data)
    return values, comments
