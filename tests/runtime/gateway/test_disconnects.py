"""A client that goes away takes its job with it, at whatever moment, unless it was told that it may come back."""

import asyncio
import contextlib
from typing import Any

import httpx
import pytest

from stoker.queue.broker import Broker
from stoker.queue.records import JobState
from tests.connections import connected

from .conftest import RunningGateway
from .peers import PATIENCE_S, Deploy, Task, until_state, worker

SSE = {"accept": "text/event-stream"}


async def claimed_job(broker: Broker, name: str) -> str:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for claim in await broker.claim(name, "test", 1):
                return claim.job_id
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("headers", [{}, SSE])
async def test_while_the_job_runs(
    gateway: RunningGateway, broker: Broker, deploy: Deploy, headers: dict[str, str]
) -> None:
    name = await deploy()
    async with httpx.AsyncClient(base_url=gateway.url, timeout=10) as client:
        call = asyncio.create_task(client.post(f"/v1/functions/{name}", json=1, headers=headers))
        job_id = await claimed_job(broker, name)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
    job = await until_state(broker, job_id, JobState.CANCELLED)
    assert job.reason == "client disconnected"


async def test_in_the_middle_of_a_stream(gateway: RunningGateway, broker: Broker, deploy: Deploy) -> None:
    still_mine = True

    async def endless(task: Task) -> None:
        nonlocal still_mine
        while still_mine:
            still_mine = await task.emit({"value": "x" * 100})
            await asyncio.sleep(0.002)

    name = await deploy()
    async with worker(broker, name, endless), httpx.AsyncClient(base_url=gateway.url, timeout=10) as client:
        async with client.stream("POST", f"/v1/functions/{name}", headers=SSE) as response:
            await anext(response.aiter_lines())
            job_id = response.headers["x-job-id"]
        await until_state(broker, job_id, JobState.CANCELLED)
    assert not still_mine


async def test_a_reader_that_stops_reading_and_then_leaves(
    gateway: RunningGateway, broker: Broker, deploy: Deploy
) -> None:
    """The gateway is blocked in a write when the connection ends."""

    async def flood(task: Task) -> None:
        while await task.emit({"value": "x" * 50_000}):
            await asyncio.sleep(0.001)

    name = await deploy()
    async with worker(broker, name, flood):
        host, port = gateway.url.removeprefix("http://").split(":")
        request = (
            f"POST /v1/functions/{name} HTTP/1.1\r\nhost: x\r\naccept: text/event-stream\r\ncontent-length: 0\r\n\r\n"
        )
        async with connected(host, int(port), limit=1) as (_, writer):
            writer.write(request.encode())
            async with asyncio.timeout(PATIENCE_S):
                while not (await broker.backlogs([name]))[name].running:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            writer.transport.abort()
        async with asyncio.timeout(PATIENCE_S):
            while (await broker.backlogs([name]))[name].running:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("delay_ms", range(0, 12))
async def test_at_whatever_moment_no_job_is_left_behind(
    gateway: RunningGateway, broker: Broker, deploy: Deploy, delay_ms: int
) -> None:
    name = await deploy()
    host, port = gateway.url.removeprefix("http://").split(":")
    for _ in range(4):
        async with connected(host, int(port)) as (_, writer):
            writer.write(f"POST /v1/functions/{name} HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n1".encode())
            await writer.drain()
            await asyncio.sleep(delay_ms / 2000)
            writer.transport.abort()
    async with asyncio.timeout(PATIENCE_S):
        quiet = 0
        while quiet < 10:
            await asyncio.sleep(0.01)
            quiet = 0 if (await broker.backlogs([name]))[name].queued else quiet + 1


@pytest.mark.parametrize("way", ["detach", "key"])
async def test_jobs_that_outlive_their_client(
    gateway: RunningGateway, broker: Broker, deploy: Deploy, way: str
) -> None:
    options: dict[str, Any] = {"on_disconnect": "detach"} if way == "detach" else {}
    headers = {"idempotency-key": "k"} if way == "key" else {}
    release = asyncio.Event()

    async def slow(task: Task) -> None:
        await release.wait()
        await task.done({"value": "made it"})

    name = await deploy(**options)
    async with worker(broker, name, slow), httpx.AsyncClient(base_url=gateway.url, timeout=10) as client:
        call = asyncio.create_task(client.post(f"/v1/functions/{name}", json=1, headers=headers))
        async with asyncio.timeout(PATIENCE_S):
            while not (await broker.backlogs([name]))[name].running:
                await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.sleep(0.1)
        assert (await broker.backlogs([name]))[name].running == 1
        release.set()
        if way == "key":
            again = await client.post(f"/v1/functions/{name}", json=1, headers=headers)
            assert again.json() == "made it"
