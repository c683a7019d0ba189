"""A server in cluster mode refuses a script that leaves the slot of its key: none does."""

import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from stoker.queue.broker import Broker
from stoker.queue.client import connect
from stoker.queue.deliveries import Deliveries, Try
from stoker.queue.embedded import valkey_binary
from stoker.queue.listing import Listing
from stoker.queue.records import Completion, Emission, Failure, JobState, NewJob, Settled, new_job_id


@pytest.fixture(scope="module")
def cluster_url(tmp_path_factory: pytest.TempPathFactory, server_binary: Path | None) -> Iterator[str]:
    """A server becomes writable two seconds after it started in cluster mode."""
    folder = tmp_path_factory.mktemp("cluster")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [server_binary or valkey_binary(), "--port", str(port), "--bind", "127.0.0.1", "--dir", folder]
    command += ["--cluster-enabled", "yes", "--cluster-port", str(port + 1 if port < 65535 else port - 1), "--save", ""]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        await_cluster(process, port)
        yield f"redis://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def await_cluster(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + 10
    with redis.Redis(port=port) as client:
        while not is_up(client):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)


def is_up(client: redis.Redis) -> bool:
    try:
        state = client.execute_command("CLUSTER INFO")
        if state["cluster_slots_assigned"] == "0":
            client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        return state["cluster_state"] == "ok"
    except redis.exceptions.ConnectionError:
        return False


def new_job(function: str, **changes: object) -> NewJob:
    values = {"tenant": "a", "payload": b"p", "stream": True, "gateway": "gw", "idempotency_key": "k"} | changes
    return NewJob(id=new_job_id(function), function=function, **values)  # type: ignore[arg-type]


async def test_a_violation_would_be_noticed(cluster_url: str) -> None:
    client = connect(cluster_url)
    with pytest.raises(redis.exceptions.ResponseError):
        await client.eval("#!lua\nredis.call('SET', KEYS[1], 1) redis.call('SET', 'other', 1)", 1, "one")  # type: ignore[misc]
    await client.aclose()


async def test_every_script_stays_in_the_slot_of_its_function(cluster_url: str) -> None:
    client = connect(cluster_url)
    broker, deliveries = Broker(client), Deliveries(client)
    for function in ("f", "g", "text-to-image"):
        jobs = [
            new_job(function, webhook="https://example.com/"),
            new_job(function, tenant="b", weight=2, start_within_ms=60_000, batch_key="k"),
            new_job(function, idempotency_key="", delay_ms=60_000),
            new_job(function, idempotency_key="", priority=2, finish_within_ms=1),
        ]
        for new in jobs:
            assert (await broker.enqueue(new)).created
        (claim,) = await broker.claim(function, "w", 1)
        assert await broker.emit(function, [Emission(claim.job_id, claim.fence, 1, b"x")]) == []
        assert await broker.beat(function, "w", {claim.job_id: claim.fence}) == {}
        assert await broker.listen(claim.job_id, "gw2")
        failure = Failure(claim.job_id, claim.fence, b"e", retry=True, counts=False)
        assert await broker.fail(function, [failure]) == [Settled.RETRYING]
        (claim,) = await broker.claim(function, "w", 1)
        completion = Completion(claim.job_id, claim.fence, b"r", b"u", cost=2.0)
        assert await broker.done(function, [completion]) == [Settled.DONE]
        await broker.tick(function)
        assert await broker.cancel(jobs[2].id) is JobState.CANCELLED
        (view,) = await broker.peek(function, [(claim.job_id, "0")], 10)
        assert view is not None and len(view.entries) == 2
        record = await broker.job(claim.job_id)
        assert record is not None and record.state is JobState.SUCCEEDED
        assert await broker.dead_letters(function) == []
        poison = new_job(function, idempotency_key="dead", priority=0)
        await broker.enqueue(poison)
        (claim,) = await broker.claim(function, "w", 1)
        await broker.fail(function, [Failure(claim.job_id, claim.fence, b"e", retry=False)])
        assert await broker.replay(claim.job_id) is JobState.QUEUED
        assert await broker.cancel(claim.job_id) is JobState.CANCELLED
        (told, *_) = await deliveries.take([function], 10, 60_000)
        assert await deliveries.tried(told, Try(1.0, 0.1, 500, ""), "pending", 60, b"said")
        assert await deliveries.again(told.id)
        assert (await Listing(client).page([function], 100, tenant="a")).jobs
    backlogs = await broker.backlogs(["f", "g", "text-to-image"])
    assert {row.queued for row in backlogs.values()} == {1}
    for function in backlogs:
        await broker.purge_function(function)
    assert await broker.functions_with_work() == []
    await client.aclose()
