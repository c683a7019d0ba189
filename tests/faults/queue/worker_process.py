"""A worker in a process of its own, to be stopped and killed."""

import asyncio
import contextlib
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from stoker.queue.broker import Broker
from stoker.queue.claimer import Claimer
from stoker.queue.client import connect
from stoker.queue.events import Bells
from stoker.queue.records import Claim, Completion, Emission, Failure
from stoker.queue.retry import AWAY, insist

POISON = b"poison"
PATIENCE_S = 30
WAIT_S = 0.05
STAND_S = 20.0


def work(url: str, name: str, lease_ms: int) -> None:
    """Claims, emits and finishes until it is killed; a poison payload kills it."""
    asyncio.run(work_forever(url, name, lease_ms))


async def work_forever(url: str, name: str, lease_ms: int) -> None:
    broker = Broker(connect(url), lease_ms=lease_ms, backoff_base_ms=1, backoff_cap_ms=5)
    held: dict[str, int] = {}
    beats = asyncio.create_task(beat_forever(broker, name, held))
    bells = Bells(url, name, on_cancel=lambda *_: None)
    await insist(bells.start, PATIENCE_S)
    claimer = Claimer(broker, bells, "f", name, WAIT_S)
    while not beats.done():
        claims = await insist(lambda: claimer.claim_or_stand(8), PATIENCE_S) or await claimer.wait()
        held.update({claim.job_id: claim.fence for claim in claims})
        await run(broker, claims)
        held.clear()


async def run(broker: Broker, claims: list[Claim]) -> None:
    for seq in (1, 2):
        chunks = [Emission(claim.job_id, claim.fence, seq, b"%d" % seq) for claim in claims if claim.stream]
        await insist(lambda chunks=chunks: broker.emit("f", chunks), PATIENCE_S)
        await asyncio.sleep(0.01)
        if any(claim.payload == POISON for claim in claims):
            os.kill(os.getpid(), signal.SIGKILL)
    results = [Completion(claim.job_id, claim.fence, b"result", b"usage") for claim in claims]
    await insist(lambda: broker.done("f", results), PATIENCE_S)


async def beat_forever(broker: Broker, name: str, held: dict[str, int]) -> None:
    while True:
        await asyncio.sleep(broker.lease_ms / 3000)
        with contextlib.suppress(*AWAY):
            await broker.beat("f", name, dict(held))


def hold(url: str, name: str, lease_ms: int, orders: Connection) -> None:
    """Claims one job and keeps it. At each order it writes all that a worker can write, and says what it was told."""
    asyncio.run(hold_one(url, name, lease_ms, orders))


async def hold_one(url: str, name: str, lease_ms: int, orders: Connection) -> None:
    client = connect(url)
    broker = Broker(client, lease_ms=lease_ms)
    (claim,) = await broker.claim("f", name, 1)
    await broker.emit("f", [Emission(claim.job_id, claim.fence, 1, b"first")])
    beats = asyncio.create_task(beat_forever(broker, name, {claim.job_id: claim.fence}))
    orders.send(claim.fence)
    while await asyncio.to_thread(orders.recv):
        orders.send(await write_everything(broker, name, claim))
    beats.cancel()
    await client.aclose()


def stand(url: str, name: str, orders: Connection) -> None:
    """Stands with a claim until it is killed; tells the jobs that come."""
    asyncio.run(stand_forever(url, name, orders))


async def stand_forever(url: str, name: str, orders: Connection) -> None:
    broker = Broker(connect(url), lease_ms=500)
    bells = Bells(url, name, on_cancel=lambda *_: None)
    await bells.start()
    while await bells.wait("f", WAIT_S):
        pass
    claimer = Claimer(broker, bells, "f", name, STAND_S)
    claims = await claimer.claim_or_stand(1)
    orders.send("stands")
    while True:
        for claim in claims or await claimer.wait():
            orders.send((claim.job_id, claim.fence))
        claims = await claimer.claim_or_stand(1)


async def write_everything(broker: Broker, name: str, claim: Claim) -> dict[str, Any]:
    held = {claim.job_id: claim.fence}
    return {
        "emit": await broker.emit("f", [Emission(claim.job_id, claim.fence, 2, b"late")]),
        "beat": await broker.beat("f", name, held),
        "done": await broker.done("f", [Completion(claim.job_id, claim.fence, b"late", b"late")]),
        "fail": await broker.fail("f", [Failure(claim.job_id, claim.fence, b"late", retry=True)]),
    }
