import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from stoker.runtime.client.lanes import POOLS, Lanes, lanes
from tests.connections import serving

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Server:
    """Counts connections; answers once the gate is open."""

    def __init__(self) -> None:
        self.connections = self.waiting = 0
        self.gate = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                self.waiting += 1
                await self.gate.wait()
                writer.write(ANSWER)


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, str]]:
    server = Server()
    async with serving(server.serve) as port:
        yield server, f"http://127.0.0.1:{port}"


async def test_one_after_another_needs_one_connection(server: tuple[Server, str]) -> None:
    counted, url = server
    counted.gate.set()
    async with httpx.AsyncClient(transport=Lanes()) as client:
        assert [(await client.get(url)).text for _ in range(20)] == ["ok"] * 20
    assert counted.connections == 1


async def test_many_at_once_are_spread_over_all_pools(server: tuple[Server, str]) -> None:
    counted, url = server
    many = Lanes()
    async with httpx.AsyncClient(transport=many) as client:
        asked = [asyncio.create_task(client.get(url)) for _ in range(4 * POOLS)]
        async with asyncio.timeout(10):
            while counted.waiting < 4 * POOLS:
                await asyncio.sleep(0.01)
        assert many._loads == [4] * POOLS
        counted.gate.set()
        assert {(await task).text for task in asked} == {"ok"}
        assert many._loads == [0] * POOLS


def test_a_proxy_of_the_environment_is_left_to_httpx(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert isinstance(lanes(), Lanes)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    assert lanes() is None
