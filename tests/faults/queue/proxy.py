"""A network that fails on request: a proxy on a Unix socket between a client and a server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self


@dataclass(eq=False)
class Pipe:
    """One proxied connection. `doomed`: its next reply is swallowed, and then it is cut."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    doomed: bool = False

    def cut(self) -> None:
        for writer in (self.client, self.server):
            writer.transport.abort()


@dataclass
class Proxy:
    """`server_path` may change: new connections go to the new server, as behind a load balancer."""

    path: Path
    server_path: Path
    lost: int = 0
    _armed: bool = False
    _pipes: set[Pipe] = field(default_factory=set)
    _open: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    def lose_next_reply(self) -> None:
        """The next script is executed, its reply is not delivered."""
        self._armed = True

    def stall(self) -> None:
        """Nothing gets through any more, in either direction; nothing is closed."""
        self._open.clear()

    def heal(self) -> None:
        """What was held up arrives now."""
        self._open.set()

    def cut(self) -> None:
        for pipe in list(self._pipes):
            pipe.cut()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        self._open.set()
        server = await asyncio.start_unix_server(self._serve, self.path)
        try:
            yield self
        finally:
            server.close()
            self.heal()
            self.cut()
            while self._pipes:
                await asyncio.sleep(0.005)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_unix_connection(self.server_path)
        except OSError:
            writer.transport.abort()
            return
        pipe = Pipe(writer, server_writer)
        self._pipes.add(pipe)
        try:
            await asyncio.gather(self._requests(pipe, reader), self._replies(pipe, server_reader))
        except OSError:
            pass
        finally:
            pipe.cut()
            self._pipes.discard(pipe)

    async def _requests(self, pipe: Pipe, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(1 << 16):
            await self._open.wait()
            if self._armed and b"EVAL" in data:
                self._armed, pipe.doomed = False, True
            pipe.server.write(data)
        pipe.cut()

    async def _replies(self, pipe: Pipe, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(1 << 16):
            await self._open.wait()
            if pipe.doomed:
                self.lost += 1
                break
            pipe.client.write(data)
        pipe.cut()
