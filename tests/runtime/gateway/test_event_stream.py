"""Chunks leave as they arrive, without a turn of the event loop, and in order however slow the client is."""

import asyncio
import random
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest
from starlette.responses import Response
from starlette.types import Message

from stoker.queue.events import EventBus
from stoker.queue.records import new_job_id, pack
from stoker.runtime.gateway.context import Gateway
from stoker.runtime.gateway.endpoint import WIRE
from stoker.runtime.gateway.event_stream import EventStream, Outlet
from stoker.runtime.gateway.following import Following
from stoker.runtime.gateway.job_events import event_frame, event_frames
from stoker.runtime.gateway.letting_go import Followings
from stoker.runtime.gateway.media import shown

from .peers import PATIENCE_S

NONE = cast(Any, None)


class Client:
    """What the server sends to a client, and its wire; while `slow`, a piece waits, as uvicorn's does."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self._fast = asyncio.Event()
        self._fast.set()

    def slow(self, slow: bool) -> None:
        if slow:
            self._fast.clear()
        else:
            self._fast.set()

    @property
    def free(self) -> bool:
        return self._fast.is_set()

    def write(self, piece: bytes) -> None:
        assert self.free
        self.pieces.append(piece)

    async def send(self, message: Message) -> None:
        if not self._fast.is_set():
            await self._fast.wait()
        if body := message.get("body"):
            self.pieces.append(body)


class Job:
    """A job whose events come over a bus without a server."""

    def __init__(self) -> None:
        self.id = new_job_id("f")
        self.bus = EventBus(NONE, NONE, "g")
        self._last = 0

    def chunk(self) -> None:
        entry, self._last = self._last + 1, self._last + 1
        self._publish(
            ["chunk", self.id, f"{entry}-0", f"{entry - 1}-0" if entry > 1 else "0", "1", "1", pack({"value": entry})]
        )

    def end(self) -> None:
        outcome = msgpack.packb([pack({"value": "over"}), False, False, False])
        self._publish(["end", self.id, f"{self._last}-0", 1, "succeeded", "", outcome])

    def _publish(self, frame: list[Any]) -> None:
        self.bus._on_message("c", cast(bytes, msgpack.packb([frame])))


async def answering(job: Job, client: Client) -> asyncio.Task[None]:
    async def listen(*_: str) -> bool:
        return True

    settings = SimpleNamespace(keepalive_s=60, gateway_id="g")
    parts = {"settings": settings, "bus": job.bus, "broker": SimpleNamespace(listen=listen)}
    gateway = cast(Gateway, SimpleNamespace(**parts, followings=Followings()))
    following = Following(gateway, job.id)
    response = EventStream(gateway, following, event_frames(following, shown), partial(event_frame, show=shown))
    task = asyncio.ensure_future(response({"type": "http", WIRE: client}, NONE, client.send))
    while not job.bus._watched:
        await asyncio.sleep(0)
    return task


def numbers(client: Client) -> list[int]:
    return [int(piece.split(b"data: ")[1]) for piece in client.pieces if b"event: end" not in piece]


async def until_sent(client: Client, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(client.pieces) < count:
            await asyncio.sleep(0)


async def test_chunks_behind_the_first_leave_at_once() -> None:
    job, client = Job(), Client()
    answer = await answering(job, client)
    job.chunk()
    assert numbers(client) == []
    await until_sent(client, 1)
    for count in range(2, 50):
        job.chunk()
        assert numbers(client) == list(range(1, count + 1))
    job.end()
    await answer
    assert b"event: end" in client.pieces[-1] and numbers(client) == list(range(1, 50))


async def test_a_piece_that_got_stuck_leaves_without_another_one() -> None:
    job, client = Job(), Client()
    answer = await answering(job, client)
    job.chunk()
    await until_sent(client, 1)
    client.slow(True)
    job.chunk()
    assert numbers(client) == [1]
    client.slow(False)
    await until_sent(client, 2)
    job.end()
    await answer


@pytest.mark.parametrize("seed", range(20))
async def test_a_client_that_is_slow_now_and_then_gets_all_in_order(seed: int) -> None:
    chance = random.Random(seed)
    job, client = Job(), Client()
    answer = await answering(job, client)
    for _ in range(200):
        action = chance.choice(["chunk", "chunk", "slow", "fast", "turn", "turn"])
        if action == "chunk":
            job.chunk()
        elif action == "turn":
            await asyncio.sleep(0)
        else:
            client.slow(action == "slow")
    job.end()
    client.slow(False)
    await asyncio.wait_for(answer, PATIENCE_S)
    assert numbers(client) == list(range(1, job._last + 1))
    assert b"event: end" in client.pieces[-1]


async def test_a_client_that_goes_away_leaves_nothing_behind() -> None:
    job, client = Job(), Client()
    answer = await answering(job, client)
    job.chunk()
    await until_sent(client, 1)
    client.slow(True)
    job.chunk()
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
    assert not job.bus._watched
    assert {task for task in asyncio.all_tasks() if task is not asyncio.current_task()} == set()


async def test_nothing_overtakes_a_piece_that_waits_for_its_turn() -> None:
    """A comment waits for a client that has stopped to read, an event behind it, and then the client reads on."""
    client = Client()
    outlet = Outlet(client.send, Response(), client)
    await outlet.send(b"first")
    client.slow(True)
    waiting = [asyncio.ensure_future(outlet.send(b": comment")), asyncio.ensure_future(outlet.send(b"second"))]
    await asyncio.sleep(0)
    client.slow(False)
    for _ in range(10):
        if outlet.free:
            outlet.push(b"third")
            break
        await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    assert client.pieces == [b"first", b": comment", b"second", b"third"]
