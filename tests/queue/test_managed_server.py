"""ElastiCache Serverless as far as a Valkey can play it: cluster mode with one endpoint that owns all slots, eviction
of keys with a TTL, and a user with the rights that terraform/ gives it."""

import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from stoker.queue.broker import Broker
from stoker.queue.client import check_server, connect
from stoker.queue.cluster import Change, Cluster
from stoker.queue.embedded import valkey_binary
from stoker.queue.events import EventBus
from stoker.queue.records import Completion, Emission, JobState, NewJob, new_job_id
from tests.children import child

QUEUE_MODULE = Path(__file__).parents[2] / "terraform" / "modules" / "queue" / "main.tf"
FULL = 8 << 20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def managed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.Redis]:
    """The administrator's connection."""
    rights = re.search(r'access_string = "(.*)"', QUEUE_MODULE.read_text())
    assert rights
    port, folder = free_port(), tmp_path_factory.mktemp("managed")
    options = [
        "--port",
        str(port),
        "--cluster-enabled",
        "yes",
        "--dir",
        str(folder),
        "--save",
        "",
        "--bind",
        "127.0.0.1",
    ]
    options += ["--cluster-port", str(free_port()), "--maxmemory-policy", "volatile-lru"]
    with child([valkey_binary(), *options], stdout=subprocess.DEVNULL):
        admin = redis.Redis(port=port, retry=redis.retry.Retry(redis.backoff.ConstantBackoff(0.05), 100))
        admin.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        while admin.cluster("info")["cluster_state"] != "ok":
            pass
        admin.execute_command("ACL", "SETUSER", "stoker", ">word", *rights[1].split())
        yield admin
        admin.close()


@pytest.fixture
def url(managed: redis.Redis) -> str:
    managed.flushall()
    return f"redis://stoker:word@127.0.0.1:{managed.get_connection_kwargs()['port']}"


def new_job(**changes: object) -> NewJob:
    return NewJob(
        **({"id": new_job_id("f"), "function": "f", "tenant": "a", "payload": b"p", "gateway": "gw"} | changes)
    )  # type: ignore[arg-type]


async def test_a_job_from_queue_to_answer(url: str) -> None:
    client = connect(url)
    await check_server(client)
    broker, bus = Broker(client), EventBus(url, Broker(client), "gw")
    await bus.start()
    job = new_job()
    await broker.enqueue(job)
    subscription = bus.watch(job.id)
    [claim] = await broker.claim("f", "w", 1)
    assert await broker.beat("f", "w", {job.id: claim.fence}) == {}
    await broker.emit("f", [Emission(job.id, claim.fence, 0, b"token")])
    await broker.done("f", [Completion(job.id, claim.fence, b"result", b"")])
    assert [event.kind for event in [event async for event in subscription]][-1] == "end"
    assert (await broker.job(job.id)).state is JobState.SUCCEEDED  # type: ignore[union-attr]
    await subscription.close()
    await bus.close()
    await client.aclose()


async def test_the_cluster_records(url: str) -> None:
    client = connect(url)
    cluster = Cluster(client)
    await cluster.change_functions("shop", lambda *_: Change({"f": {}, "g": {}}, [], {"1": {}}))
    await cluster.report_host("h1", {"devices": []})
    await cluster.report_host("h2", {"devices": []})
    assert list(await cluster.hosts()) == ["h1", "h2"]
    assert await cluster.acquire_leadership("c", 1000) == 1
    assert await cluster.write_wanted("c", {"h1": {}})
    await client.aclose()


async def test_a_full_server_forgets_ended_jobs_but_no_live_one(url: str, managed: redis.Redis) -> None:
    client = connect(url)
    broker = Broker(client)
    live = [new_job(payload=b"x" * 1000) for _ in range(50)]
    for job in live:
        await broker.enqueue(job)
    managed.config_set("maxmemory", managed.info("memory")["used_memory"] + FULL)
    try:
        while managed.info("stats")["evicted_keys"] == 0:
            job = new_job(function="g", id=new_job_id("g"))
            await broker.enqueue(job)
            [claim] = await broker.claim("g", "w", 1)
            await broker.done("g", [Completion(job.id, claim.fence, b"x" * 60_000, b"")])
        claimed = {claim.job_id for _ in range(50) for claim in await broker.claim("f", "w", 1)}
        assert claimed == {job.id for job in live}
    finally:
        managed.config_set("maxmemory", 0)
    await client.aclose()
