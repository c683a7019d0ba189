"""An open connection to the server without a task that reads it: replies are told as they arrive."""

import asyncio
from collections.abc import Callable
from typing import Any

import hiredis
from redis._parsers.base import BaseParser
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse

NOTHING_YET = object()
# The server begins with the first commands of a tick while the others are made.
WRITE_BYTES = 4096


class Link(asyncio.Protocol):
    """`on_reply(reply)` for each reply, an error reply being an exception; `on_end(error)` once, when it is over."""

    def __init__(
        self, connection: AbstractConnection, on_reply: Callable[[Any], None], on_end: Callable[[Exception], None]
    ) -> None:
        """Takes over an open connection of redis-py, which has no part in it from then on."""
        self.over = False
        self._on_reply = on_reply
        self._on_end = on_end
        self._reader = hiredis.Reader(
            protocolError=InvalidResponse, replyError=BaseParser.parse_error, notEnoughData=NOTHING_YET
        )
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._paused = False
        self._loop = asyncio.get_running_loop()
        self._lost = self._loop.create_future()
        # A StreamWriter that is collected closes its transport.
        self._writer, connection._writer, connection._reader = connection._writer, None, None
        assert self._writer is not None
        self._transport: asyncio.Transport = self._writer.transport  # type: ignore[assignment]
        self._transport.set_protocol(self)

    def send(self, command: bytes) -> None:
        """What is sent in one tick of the event loop leaves in one write, or in several when it is much."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(command)
        self._unsent_bytes += len(command)
        if self._unsent_bytes >= WRITE_BYTES:
            self._flush()

    def end(self, error: Exception) -> None:
        """Closes the connection; `on_end` is told `error` unless it was over before."""
        self._transport.abort()
        if not self.over:
            self.over = True
            self._on_end(error)

    async def ended(self) -> None:
        """Waits until the socket is closed."""
        await self._lost

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not NOTHING_YET:
                self._on_reply(reply)
        except InvalidResponse as error:
            self.end(error)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(RedisConnectionError(f"connection to the server lost: {exc}" if exc else "the server hung up"))
        if not self._lost.done():
            self._lost.set_result(None)

    def _flush(self) -> None:
        if self._unsent and not self._paused and not self._transport.is_closing():
            commands, self._unsent, self._unsent_bytes = self._unsent, [], 0
            self._transport.write(b"".join(commands))


def packed(*command: Any) -> bytes:
    return hiredis.pack_command(command)


async def connected(pool: ConnectionPool) -> AbstractConnection:
    """A connection of the pool's kind (TLS, AUTH, SELECT done) that isn't the pool's; raises what redis-py raises."""
    connection = pool.make_connection()
    try:
        await connection.connect()
    except BaseException:
        await connection.disconnect(nowait=True)
        raise
    return connection
