import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from stoker.queue.client import ServerUnfit, check_server, connect, unfitness
from tests.connections import serving


@contextlib.asynccontextmanager
async def counting_server(path: Path, answer: bytes | None) -> AsyncIterator[list[bytes]]:
    """Counts INCR commands; hangs up (answer None) or says nothing (b"") instead of replying to them."""
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            if b"INCR" not in data:
                writer.write(b"+OK\r\n" * data.count(b"*"))
                continue
            seen.append(data)
            if answer is None:
                break

    async with serving(serve, path):
        yield seen


async def test_a_write_whose_reply_is_lost_is_not_sent_again(tmp_path: Path) -> None:
    async with counting_server(tmp_path / "s", None) as seen:
        client = connect(f"unix://{tmp_path}/s")
        with pytest.raises(RedisConnectionError):
            await client.incr("counter")
        assert len(seen) == 1
        await client.aclose()


async def test_a_silent_server_is_a_timeout(tmp_path: Path) -> None:
    async with counting_server(tmp_path / "s", b"") as seen:
        client = connect(f"unix://{tmp_path}/s", socket_timeout_s=0.5)
        with pytest.raises(RedisTimeoutError):
            await client.incr("counter")
        assert len(seen) == 1
        await client.aclose()


@pytest.mark.parametrize("warm", [False, True])
async def test_a_cancelled_call_ends_at_whatever_step(server_url: str, warm: bool) -> None:
    for steps in range(25):
        client = connect(server_url)
        if warm:
            await client.ping()
        call = asyncio.create_task(client.get("key"))
        for _ in range(steps):
            await asyncio.sleep(0)
        if call.cancel():
            with pytest.raises(asyncio.CancelledError):
                await call
        assert await client.ping()
        await client.aclose()


@pytest.mark.parametrize("url", ["", "localhost:6379", "http://localhost", "unix"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="redis://host:port"):
        connect(url)


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("redis://user:secret@host:1234/2", "PromptConnection"),
        ("rediss://host:1234/2", "PromptTLSConnection"),
        ("unix:///run/valkey.sock?db=2", "PromptUnixConnection"),
    ],
)
def test_every_transport_has_the_same_rules(url: str, kind: str) -> None:
    pool = connect(url).connection_pool
    connection = pool.make_connection()
    assert type(connection).__name__ == kind
    assert (connection.db, connection.socket_timeout) == (2, 10)
    assert connection.retry.get_retries() == 0


async def test_more_calls_than_connections_wait_their_turn(server_url: str) -> None:
    client = connect(server_url, max_connections=2)
    assert await asyncio.gather(*(client.ping() for _ in range(50))) == [True] * 50
    await client.aclose()


async def test_a_server_that_may_evict_live_jobs_is_refused(client: Redis) -> None:
    await check_server(client)
    await client.config_set("maxmemory-policy", "volatile-lru")
    await check_server(client)
    await client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(ServerUnfit, match="allkeys-lru.*noeviction"):
            await check_server(client)
    finally:
        await client.config_set("maxmemory-policy", "noeviction")


@pytest.mark.parametrize(("version", "fit"), [("6.2.14", False), ("7.0.0", True), ("7.2.4", True), ("8.10.1", True)])
def test_old_servers_are_refused(version: str, fit: bool) -> None:
    reason = unfitness({"redis_version": version, "maxmemory_policy": "noeviction"})
    assert (reason == "") is fit
    assert fit or "7.0 or later" in reason
