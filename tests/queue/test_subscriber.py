import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from redis.exceptions import NoPermissionError

from stoker.queue import subscriber as subscriber_module
from stoker.queue.client import connect
from stoker.queue.subscriber import Subscriber
from tests.connections import serving

CONFIRMED = b"*3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n"
PONG = b"*2\r\n$4\r\npong\r\n$0\r\n\r\n"


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


class Peer:
    """A server that confirms subscriptions and answers pings, or falls silent."""

    def __init__(self) -> None:
        self.silent = False
        self.connections = 0
        self.pings = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while data := await reader.read(4096):
            self.pings += data.count(b"PING")
            if b"SUBSCRIBE" in data:
                writer.write(CONFIRMED)
            elif b"PING" not in data:
                writer.write(b"+OK\r\n" * data.count(b"*"))
            elif not self.silent:
                writer.write(PONG)

    async def run(self, path: Path, test: Callable[[], Awaitable[None]]) -> None:
        async with serving(self.serve, path):
            await test()


async def test_a_connection_that_answers_no_ping_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber_module, "PING_AFTER_S", 0.02)
    monkeypatch.setattr(subscriber_module, "DEAD_AFTER_S", 1.0)
    peer, ready = Peer(), []

    async def test() -> None:
        subject = Subscriber(f"unix://{tmp_path}/s", lambda channel, data: None, ready.append)
        await subject.start("c")
        await eventually(lambda: peer.pings >= 10)
        assert (peer.connections, ready) == (1, ["c"])
        peer.silent = True
        await eventually(lambda: peer.connections >= 2 and len(ready) >= 2)
        await subject.close()

    await peer.run(tmp_path / "s", test)


async def test_channels_added_later_come_back_after_a_reconnect(server_url: str, raw) -> None:
    seen: list[tuple[str, bytes]] = []
    ready: list[str] = []
    subject = Subscriber(server_url, lambda channel, data: seen.append((channel, data)), ready.append)
    await subject.start("first")
    for _ in range(2):
        await subject.subscribe("second")
    await eventually(lambda: ready == ["first", "second"])
    raw.client_kill_filter(_type="pubsub")
    await eventually(lambda: sorted(ready) == ["first", "first", "second", "second"])
    for channel in ("first", "second", "third"):
        raw.publish(channel, channel)
    await eventually(lambda: len(seen) == 2)
    assert seen == [("first", b"first"), ("second", b"second")]
    await subject.close()


async def test_a_factory_can_make_the_client(server_url: str, raw) -> None:
    seen: list[bytes] = []
    subject = Subscriber(lambda: connect(server_url), lambda channel, data: seen.append(data), lambda channel: None)
    await subject.start("c")
    raw.publish("c", b"1")
    await eventually(lambda: seen == [b"1"])
    await subject.close()
    await subject.close()


async def test_a_refused_subscription_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.CONFIRMED", b"-NOPERM this user has no access to the channel\r\n")

    async def test() -> None:
        subject = Subscriber(f"unix://{tmp_path}/s", lambda channel, data: None, lambda channel: None)
        with pytest.raises(NoPermissionError):
            await subject.start("c")

    await Peer().run(tmp_path / "s", test)
