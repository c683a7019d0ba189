"""Many clients that wait, each with a stream of its own: what one of them may cost (5,000 of them: 400 MB)."""

import asyncio
from collections.abc import Iterator

import pytest

from stoker.queue.embedded import EmbeddedValkey
from tests.connections import close
from tests.runtime.gateway.peers import Deploy

from .gateway_process import GatewayProcess, gateway_process

STREAMS = 500
MOST_BYTES = 50_000


@pytest.fixture(scope="module")
def process(valkey: EmbeddedValkey, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with gateway_process(valkey.url, tmp_path_factory.mktemp("idle-store").as_uri(), {}) as gateway:
        yield gateway


async def test_an_idle_stream_is_cheap(process: GatewayProcess, deploy: Deploy) -> None:
    """Their jobs wait for a worker that never comes; each stream is told so twice."""
    name = await deploy()
    head = f"POST /v1/functions/{name} HTTP/1.1\r\nhost: x\r\naccept: text/event-stream\r\n"
    request = f"{head}content-type: application/json\r\ncontent-length: 1\r\n\r\n1".encode()
    turn = asyncio.Semaphore(25)

    async def opened() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with turn:
            reader, writer = await asyncio.open_connection("127.0.0.1", process.port)
            writer.write(request)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            return reader, writer

    first = await opened()
    before = process.rss
    streams = await asyncio.gather(*(opened() for _ in range(STREAMS)))
    for _ in range(2):
        await asyncio.gather(*(reader.readuntil(b"\n: ") for reader, _ in streams))
    grown = process.rss - before
    await asyncio.gather(*(close(each) for _, each in [*streams, first]))
    assert grown / STREAMS < MOST_BYTES
    assert process.healthy()
