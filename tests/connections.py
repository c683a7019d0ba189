"""Both ends of the connections of tests: none is left open behind them, not even by a test that fails."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def connected(host: str | None = None, port: int | None = None, **options: Any) -> AsyncIterator[Ends]:
    reader, writer = await asyncio.open_connection(host, port, **options)
    try:
        yield reader, writer
    finally:
        await close(writer)


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


@contextlib.asynccontextmanager
async def serving(serve: Serve, path: Path | None = None, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A server on a Unix socket, or on the TCP port that this gives. `serve` need not close its connection; it is
    cancelled at the end."""
    running: dict[asyncio.Task[Any] | None, asyncio.StreamWriter] = {}

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running[asyncio.current_task()] = writer
        try:
            with contextlib.suppress(ConnectionError):
                await serve(reader, writer)
        finally:
            await close(writer)
            del running[asyncio.current_task()]

    if path:
        server = await asyncio.start_unix_server(handle, path)
    else:
        server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
    try:
        yield 0 if path else server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task, writer in list(running.items()):
            writer.transport.abort()
            if task:
                task.cancel()
        await asyncio.gather(*(task for task in running if task), return_exceptions=True)
