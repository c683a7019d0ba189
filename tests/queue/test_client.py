import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from stoker.queue.client import ServerUnfit, check_server, connect, unfitness


@contextlib.asynccontextmanager
async def counting_server(path: Path, answer: bytes | None) -> AsyncIterator[list[bytes]]:
    """Counts INCR commands; hangs up (answer None) or says nothing (b"") instead of replying to them."""
    seen: list[bytes] = []
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        while data := await reader.read(4096):
            if b"INCR" not in data:
                writer.write(b"+OK\r\n" * data.count(b"*"))
                continue
            seen.append(data)
            if answer is None:
                break
        writer.close()

    server = await asyncio.start_unix_server(serve, path)
    try:
        yield seen
    finally:
        server.close()
        for writer in writers:
            writer.close()
        await asyncio.sleep(0)


async def test_a_write_whose_reply_is_lost_is_not_sent_again(tmp_path: Path) -> None:
    async with counting_server(tmp_path / "s", None) as seen:
        client = connect(f"unix://{tmp_path}/s")
        with pytest.raises(RedisConnectionError):
            await client.incr("counter")
        assert len(seen) == 1
        await client.aclose()


async def test_a_silent_server_is_a_timeout(tmp_path: Path) -> None:
    async with counting_server(tmp_path / "s", b"") as seen:
        client = connect(f"unix://{tmp_path}/s", socket_timeout_s=0.1)
        with pytest.raises(RedisTimeoutError):
            await client.incr("counter")
        assert len(seen) == 1
        await client.aclose()


async def test_more_calls_than_connections_wait_their_turn(server_url: str) -> None:
    client = connect(server_url, max_connections=2)
    assert await asyncio.gather(*(client.ping() for _ in range(50))) == [True] * 50
    await client.aclose()


async def test_an_evicting_server_is_refused(client: Redis) -> None:
    await check_server(client)
    await client.config_set("maxmemory-policy", "volatile-lru")
    try:
        with pytest.raises(ServerUnfit, match="volatile-lru.*noeviction"):
            await check_server(client)
    finally:
        await client.config_set("maxmemory-policy", "noeviction")


@pytest.mark.parametrize(("version", "fit"), [("6.2.14", False), ("7.0.0", True), ("7.2.4", True), ("8.10.1", True)])
def test_old_servers_are_refused(version: str, fit: bool) -> None:
    reason = unfitness({"redis_version": version, "maxmemory_policy": "noeviction"})
    assert (reason == "") is fit
    assert fit or "7.0 or later" in reason
