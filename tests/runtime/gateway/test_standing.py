"""Streams of a tenant that is gone: they end, and what its name's next owner does is not in them."""

import asyncio

import httpx
from redis.asyncio import Redis

from stoker.queue.broker import Broker
from stoker.queue.cluster import Cluster
from stoker.runtime.spec import FunctionSpec

from .conftest import Login
from .peers import ServerEvent, Task, make_key, server_events, worker

FULL = "acme.mine"


async def test_a_job_s_events_end_with_its_tenant(
    root: httpx.AsyncClient, login: Login, cluster: Cluster, broker: Broker, redis: Redis
) -> None:
    spec = FunctionSpec(name=FULL, kind="python", code="0" * 64, entry="m:f", born="first").to_dict()
    before = login((await make_key(root, "acme", "invoke"))["key"])
    await cluster.put_function(FULL, spec)
    waiting = (await before.post("/v1/functions/mine/jobs", json=1)).json()["id"]
    events: list[ServerEvent] = []
    try:
        async with asyncio.timeout(15), before.stream("GET", f"/v1/jobs/{waiting}/events") as response:
            async for event in server_events(response):
                if not events:
                    await root.delete("/v1/tenants/acme")
                    after = login((await make_key(root, "acme", "invoke"))["key"])
                    await cluster.put_function(FULL, {**spec, "born": "second"})
                    async with worker(broker, FULL, secret):
                        told = await after.post("/v1/functions/mine", json=2)
                events.append(event)
    finally:
        await cluster.delete_function(FULL)
    assert told.json() == "the next owner's" and (await after.get(f"/v1/jobs/{waiting}")).status_code == 404
    said = [event for event in events if event.data]
    assert [event.name for event in said] == ["state", "error"] and '"job_cancelled"' in said[1].data
    assert "next owner" not in str(events)


async def secret(task: Task) -> None:
    await task.emit({"value": "the next owner's"})
    await task.done({"value": "the next owner's"})
