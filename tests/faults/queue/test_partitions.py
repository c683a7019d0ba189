"""The network stalls under a subscription, without a word: the listener finds out, comes back and misses nothing."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from stoker.queue import subscriber
from stoker.queue.broker import Broker
from stoker.queue.client import connect
from stoker.queue.embedded import EmbeddedValkey
from stoker.queue.events import Bells, EventBus
from stoker.queue.records import Completion, Emission, JobState
from tests.faults.queue.conftest import MakeJob
from tests.faults.queue.proxy import Proxy

DEAD_AFTER_S = 0.5

Heal = Callable[[Proxy], Awaitable[None]]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber, "PING_AFTER_S", 0.1)
    monkeypatch.setattr(subscriber, "DEAD_AFTER_S", DEAD_AFTER_S)


async def short(proxy: Proxy) -> None:
    """What was held up arrives, late."""
    await asyncio.sleep(DEAD_AFTER_S / 3)
    proxy.heal()


async def long(proxy: Proxy) -> None:
    """The old connection is given up before the network is back."""
    await asyncio.sleep(DEAD_AFTER_S * 3)
    proxy.heal()


async def torn(proxy: Proxy) -> None:
    """What was held up is lost with its connection."""
    await asyncio.sleep(DEAD_AFTER_S / 3)
    proxy.cut()
    proxy.heal()


@pytest.mark.parametrize("heal", [short, long, torn])
async def test_no_event_is_missed(
    server: EmbeddedValkey, broker: Broker, job: MakeJob, tmp_path: Path, heal: Heal
) -> None:
    async with Proxy(tmp_path / "p", server.socket_path).running() as proxy:
        behind = connect(proxy.url, socket_timeout_s=1)
        bus = EventBus(proxy.url, Broker(behind), "gw", level_s=60)
        await bus.start()
        new = job()
        subscription = bus.watch(new.id)
        await broker.enqueue(new)
        (claim,) = await broker.claim("f", "w", 1)
        await broker.emit("f", [Emission(new.id, claim.fence, 1, b"1")])
        assert (await anext(subscription)).data == b"1"
        proxy.stall()
        await broker.emit("f", [Emission(new.id, claim.fence, seq, b"%d" % seq) for seq in (2, 3)])
        await broker.done("f", [Completion(new.id, claim.fence, b"r", b"u")])
        await heal(proxy)
        async with asyncio.timeout(20):
            events = [event async for event in subscription]
        assert [event.data for event in events[:-1]] == [b"2", b"3"]
        assert (events[-1].kind, events[-1].state) == ("end", JobState.SUCCEEDED)
        await bus.close()
        await behind.aclose()


@pytest.mark.parametrize("heal", [short, long, torn])
async def test_no_bell_is_missed(
    server: EmbeddedValkey, broker: Broker, job: MakeJob, tmp_path: Path, heal: Heal
) -> None:
    cancelled: list[str] = []
    async with Proxy(tmp_path / "p", server.socket_path).running() as proxy:
        bells = Bells(proxy.url, "w", on_cancel=lambda job_id, _: cancelled.append(job_id))
        await bells.start()
        while await bells.wait("f", 0.2):
            pass
        proxy.stall()
        await broker.enqueue(job())
        assert not await bells.wait("f", 0.05)
        await heal(proxy)
        assert await bells.wait("f", 20)
        await bells.close()
