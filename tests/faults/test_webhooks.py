"""SIGKILL, for real, around the delivery of webhooks: each end of a job arrives at least once, under one id."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stoker.queue.broker import Broker
from stoker.queue.client import connect
from stoker.queue.deliveries import Deliveries
from stoker.queue.embedded import EmbeddedValkey
from stoker.queue.records import Completion, NewJob, new_job_id, pack
from stoker.runtime.webhooks.secret_shelf import SecretShelf
from tests.runtime.webhooks.receiver import Receiver, receiving

pytestmark = pytest.mark.xdist_group("faults")

SECRET = "the secret of this deployment"
GATEWAY = """
import json, sys
from stoker.runtime.gateway.server import server
from stoker.runtime.gateway.settings import GatewaySettings
from stoker.runtime.webhooks.address import networks_of
facts = json.loads(sys.argv[1])
settings = GatewaySettings(
    **facts, webhook_networks=networks_of("127.0.0.0/8"), webhook_pauses_s=(0.2,) * 50, webhook_lease_s=1.0
)
server(settings, "127.0.0.1", 0).run()
"""


@dataclass
class World:
    valkey: EmbeddedValkey
    store: str
    gateways: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start_gateway(self) -> subprocess.Popen[bytes]:
        facts = json.dumps({"redis_url": self.valkey.url, "store_url": self.store, "secret": SECRET})
        self.gateways.append(subprocess.Popen([sys.executable, "-c", GATEWAY, facts]))
        return self.gateways[-1]

    async def end_jobs(self, count: int, url: str) -> list[str]:
        client = connect(self.valkey.url)
        broker, ids = Broker(client), [new_job_id("f") for _ in range(count)]
        for id in ids:
            await broker.enqueue(NewJob(id=id, function="f", tenant="default", payload=pack({}), webhook=url))
        while claims := await broker.claim("f", "w", 64):
            ended = [Completion(each.job_id, each.fence, pack({"value": 1}), pack({})) for each in claims]
            await broker.done("f", ended)
        await client.aclose()
        return ids

    async def secret(self) -> str:
        client = connect(self.valkey.url)
        secrets = await SecretShelf(client, SECRET).secrets_of("default")
        await client.aclose()
        return secrets.current

    async def statuses(self, ids: list[str]) -> set[str]:
        client = connect(self.valkey.url)
        found = [await Deliveries(client).of_job(id, 1) for id in ids]
        await client.aclose()
        return {delivery.status for ((delivery, _),) in found}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    valkey = EmbeddedValkey(tmp_path / "valkey")
    valkey.start()
    world = World(valkey, (tmp_path / "store").as_uri())
    yield world
    for gateway in world.gateways:
        gateway.kill()
        gateway.wait()
    valkey.stop()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


async def until_delivered(world: World, ids: list[str]) -> None:
    async with asyncio.timeout(60):
        while await world.statuses(ids) != {"delivered"}:
            await asyncio.sleep(0.1)


def told(receiver: Receiver) -> dict[str, set[str]]:
    """Job -> the ids under which its end was told."""
    found: dict[str, set[str]] = {}
    for call in receiver.calls:
        found.setdefault(call.event["data"]["id"], set()).add(call.headers["webhook-id"])
    return found


async def test_a_gateway_that_dies_while_it_delivers_leaves_it_to_another(world: World, receiver: Receiver) -> None:
    release = threading.Event()
    receiver.answer = lambda number: (200, {"x-late": str(number == 0 and release.wait(10))})
    first = world.start_gateway()
    (job,) = ids = await world.end_jobs(1, receiver.url)
    await asyncio.to_thread(receiver.wait, 1, 20)
    first.send_signal(signal.SIGKILL)
    first.wait()
    release.set()
    assert await world.statuses(ids) == {"pending"}
    world.start_gateway()
    await asyncio.to_thread(receiver.wait, 2, 20)
    await until_delivered(world, ids)
    assert told(receiver) == {job: {receiver.calls[0].headers["webhook-id"]}}
    secret = await world.secret()
    assert receiver.calls[0].verified(secret) == receiver.calls[1].verified(secret)


async def test_a_gateway_that_is_told_to_stop_gives_back_what_it_delivers(world: World, receiver: Receiver) -> None:
    release = threading.Event()
    receiver.answer = lambda number: (200, {"x-late": str(number == 0 and release.wait(10))})
    first = world.start_gateway()
    ids = await world.end_jobs(1, receiver.url)
    await asyncio.to_thread(receiver.wait, 1, 20)
    first.terminate()
    await asyncio.to_thread(first.wait, 10)
    client = connect(world.valkey.url)
    (again,) = await Deliveries(client).take(["f"], 1, 1)
    await client.aclose()
    assert again.job_id == ids[0]
    release.set()


async def test_jobs_that_end_while_no_gateway_lives(world: World, receiver: Receiver) -> None:
    ids = await world.end_jobs(50, receiver.url)
    world.start_gateway()
    await until_delivered(world, ids)
    assert {job: len(names) for job, names in told(receiver).items()} == dict.fromkeys(ids, 1)


async def test_gateways_die_again_and_again_and_the_server_once(world: World, receiver: Receiver) -> None:
    """Half of the calls fail, too."""
    receiver.answer = lambda number: (500 if number % 2 else 200, {})
    ids, gateways = await world.end_jobs(150, receiver.url), [world.start_gateway()]
    for round in range(3):
        gateways.append(world.start_gateway())
        await asyncio.to_thread(receiver.wait, len(receiver.calls) + 20, 20)
        gateways[-2].send_signal(signal.SIGKILL)
        if round == 1:
            os.kill(world.valkey.pid or 0, signal.SIGKILL)
            while world.valkey.alive():
                await asyncio.sleep(0.01)
            world.valkey.start()
            ids += await world.end_jobs(20, receiver.url)
    await until_delivered(world, ids)
    assert {job: len(names) for job, names in told(receiver).items()} == dict.fromkeys(ids, 1)
