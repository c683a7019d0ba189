import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from queue_certificate import certificate
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, NoScriptError, ReadOnlyError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from stoker.queue.client import connect
from stoker.queue.embedded import EmbeddedValkey
from stoker.queue.pipeline import SHARED, PipelinedRedis
from tests.connections import close, serving

ECHO = "return {KEYS[1], ARGV[1], ARGV[2], false, 7, {ok='fine'}}"

# In this order on an empty database; each of them is also tried on redis-py's own client.
COMMANDS: list[tuple[Any, ...]] = [
    ("SET", "text", "é"),
    ("SET", "text", b"\x00\r\n$5", "PX", 100_000),
    ("SET", "text", "no", "NX"),
    ("GET", "text"),
    ("GET", "missing"),
    ("MGET", "text", "missing"),
    ("HSET", "hash", "a", 1, "b", 2.5, "big", b"x" * 100_000),
    ("HGET", "hash", "a"),
    ("HGET", "hash", "missing"),
    ("HGETALL", "hash"),
    ("HGETALL", "missing"),
    ("HDEL", "hash", "a", "missing"),
    ("SADD", "set", "x", "y", b"\xff"),
    ("SMEMBERS", "set"),
    ("SREM", "set", "x"),
    ("ZRANGE", "sorted", 0, -1),
    ("ZRANGE", "missing", 0, -1, "WITHSCORES"),
    ("XRANGE", "stream", "-", "+"),
    ("XRANGE", "stream", "(1-1", "+", "COUNT", 1),
    ("EVAL", ECHO, 1, "key", "text", 10**15),
    ("EVAL", "return redis.error_reply('OUCH it failed')", 0),
    ("EVALSHA", "0" * 40, 0),
    ("PUBLISH", "channel", b""),
    ("PING",),
    ("DEL", "text", "missing"),
    ("GET", "hash"),
]


@pytest.fixture
async def client(server_url: str) -> AsyncIterator[Redis]:
    connection = connect(server_url)
    await connection.flushall()
    yield connection
    await connection.flushall()
    await connection.aclose()


async def outcome(client: Redis, command: tuple[Any, ...]) -> tuple[type, Any]:
    try:
        reply = await client.execute_command(*command)
    except ResponseError as error:
        return type(error), str(error)
    return type(reply), reply


async def test_every_shared_command_answers_as_on_redis_py(server_url: str, client: Redis) -> None:
    assert {command[0] for command in COMMANDS} == SHARED
    async with Redis.from_url(server_url, protocol=2) as plain:
        answers = []
        for subject in (plain, client):
            await plain.flushall()
            await plain.zadd("sorted", {"y": 2, "x": 1})
            for n in (1, 2, 3):
                await plain.xadd("stream", {"n": n}, id=f"1-{n}")
            answers.append([await outcome(subject, command) for command in COMMANDS])
    assert answers[0] == answers[1]


async def test_calls_of_one_tick_share_a_read_of_the_server(client: Redis) -> None:
    await client.set("n", 0)
    before = await client.info("stats")
    replies = await asyncio.gather(*(client.eval("return redis.call('INCR', 'n')", 0) for _ in range(100)))
    after = await client.info("stats")
    assert replies == list(range(1, 101))
    assert after["total_reads_processed"] - before["total_reads_processed"] <= 4


async def test_more_than_the_socket_takes_at_once(client: Redis) -> None:
    values = [bytes([65 + n]) * 1_000_000 for n in range(20)]
    await asyncio.gather(*(client.set(f"k{n}", value) for n, value in enumerate(values)))
    assert await asyncio.gather(*(client.get(f"k{n}") for n in range(20))) == values


async def test_a_cancelled_call_leaves_the_others_their_own_replies(client: Redis) -> None:
    for n in range(20):
        await client.set(f"k{n}", n)
    calls = [asyncio.create_task(client.get(f"k{n}")) for n in range(20)]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    replies = await asyncio.gather(*calls, return_exceptions=True)
    assert replies[1::2] == [str(n).encode() for n in range(1, 20, 2)]
    assert all(isinstance(reply, asyncio.CancelledError) for reply in replies[::2])


async def test_after_a_restart_of_the_server_the_next_call_connects_anew(tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path)
    server.start()
    client = connect(server.url)
    await client.set("key", "kept")
    server.stop()
    for _ in range(2):
        with pytest.raises(RedisConnectionError):
            await client.get("key")
    server.start()
    assert await client.get("key") == b"kept"
    await client.aclose()
    server.stop()


async def test_many_first_calls_open_one_connection(server_url: str, client: Redis) -> None:
    before = (await client.info("stats"))["total_connections_received"]
    fresh = connect(server_url)
    await asyncio.gather(*(fresh.get("key") for _ in range(50)))
    await fresh.aclose()
    assert (await client.info("stats"))["total_connections_received"] == before + 1


async def test_password_and_database(server_url: str, client: Redis) -> None:
    await client.config_set("requirepass", "s3cret")
    try:
        address = server_url.removeprefix("unix://")
        inside = connect(f"unix://:s3cret@{address}?db=3")
        await inside.set("only", "in 3")
        await inside.aclose()
        outside = connect(f"unix://:wrong@{address}")
        with pytest.raises(RedisConnectionError, match="invalid username-password|WRONGPASS"):
            await outside.get("only")
        await outside.aclose()
    finally:
        await client.config_set("requirepass", "")
    assert await client.get("only") is None
    await client.swapdb(0, 3)
    assert await client.get("only") == b"in 3"


@contextlib.asynccontextmanager
async def scripted_server(path: Path, answer: bytes | None) -> AsyncIterator[list[bytes]]:
    """Says `answer` to GET and hangs up when that is None; counts connections that sent a GET."""
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if b"GET" not in data:
                writer.write(b"+OK\r\n" * data.count(b"*"))
                continue
            seen.append(data)
            if answer is None:
                break
            writer.write(answer)

    async with serving(serve, path):
        yield seen


async def both(client: Redis) -> list[Any]:
    return await asyncio.gather(client.get("a"), client.get("b"), return_exceptions=True)


async def test_a_silent_server_times_out_every_call_and_gets_nothing_twice(tmp_path: Path) -> None:
    async with scripted_server(tmp_path / "s", b"") as seen:
        client = connect(f"unix://{tmp_path}/s", socket_timeout_s=0.5)
        assert [type(error) for error in await both(client)] == [RedisTimeoutError] * 2
        assert b"".join(seen).count(b"GET") == 2
        await client.aclose()


async def test_a_hung_up_connection_fails_every_call_and_gets_nothing_twice(tmp_path: Path) -> None:
    async with scripted_server(tmp_path / "s", None) as seen:
        client = connect(f"unix://{tmp_path}/s")
        assert [type(error) for error in await both(client)] == [RedisConnectionError] * 2
        assert b"".join(seen).count(b"GET") == 2
        await client.aclose()


@pytest.mark.parametrize("answer", [b"@nonsense\r\n", b"$1\r\nx\r\n" * 3])
async def test_what_is_not_the_protocol_ends_the_line(tmp_path: Path, answer: bytes) -> None:
    async with scripted_server(tmp_path / "s", answer):
        client = connect(f"unix://{tmp_path}/s")
        replies = await both(client)
        assert replies == [b"x", b"x"] or [type(error) for error in replies] == [InvalidResponse] * 2
        async with asyncio.timeout(30):
            while client._line is None or client._line.usable:  # type: ignore[attr-defined]
                await asyncio.sleep(0.005)
        await client.aclose()


async def test_a_demoted_primary_is_left(tmp_path: Path) -> None:
    async with scripted_server(tmp_path / "s", b"-READONLY You can't write\r\n") as seen:
        client = connect(f"unix://{tmp_path}/s")
        for _ in range(2):
            with pytest.raises(ReadOnlyError):
                await client.get("a")
        assert len(seen) == 2
        await client.aclose()


async def test_what_still_waits_when_the_client_is_closed_is_told(tmp_path: Path) -> None:
    async with scripted_server(tmp_path / "s", b""):
        client = connect(f"unix://{tmp_path}/s")
        call = asyncio.create_task(client.get("a"))
        await asyncio.sleep(0.05)
        await client.aclose()
        with pytest.raises(RedisConnectionError, match="closed"):
            await call


async def test_other_commands_stay_with_redis_py(client: Redis) -> None:
    with pytest.raises(NoScriptError):
        await client.evalsha("0" * 40, 0)
    assert await client.incr("counter") == 1
    assert await client.blpop(["nothing"], timeout=0.01) is None
    async with client.pipeline(transaction=True) as pipeline:
        assert await pipeline.set("a", 1).get("a").execute() == [True, b"1"]


@contextlib.asynccontextmanager
async def tls_proxy(path: str, context: ssl.SSLContext) -> AsyncIterator[int]:
    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(path)
        try:
            await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))
        finally:
            await close(inner_writer)

    async with serving(serve, tls=context) as port:
        yield port


async def test_tls(server_url: str, client: Redis, tmp_path: Path) -> None:
    context = certificate(tmp_path)
    async with tls_proxy(server_url.removeprefix("unix://"), context) as port:
        inside = connect(f"rediss://localhost:{port}?ssl_ca_certs={tmp_path}/cert.pem")
        assert isinstance(inside, PipelinedRedis)
        await asyncio.gather(*(inside.set(f"k{n}", b"x" * 50_000) for n in range(20)))
        assert await inside.get("k19") == b"x" * 50_000
        await inside.aclose()
        stranger = connect(f"rediss://localhost:{port}")
        with pytest.raises(RedisConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            await stranger.get("k1")
        await stranger.aclose()
    assert await client.get("k1") == b"x" * 50_000
