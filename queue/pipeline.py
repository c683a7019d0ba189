"""A Redis client whose short commands share one connection: those of one event-loop tick leave in one write.

redis-py keeps what it is good at: it parses URLs, opens the connection (TLS, AUTH, SELECT), and runs what may block or
changes a connection's state on connections of its own. A cluster's redirects are the business of its RedisCluster.
"""

import asyncio
from collections import deque
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, ReadOnlyError
from redis.exceptions import TimeoutError as RedisTimeoutError

from stoker.queue.link import Link, connected, packed

SHARED = frozenset(
    ("DEL", "EVAL", "EVALSHA", "GET", "HDEL", "HGET", "HGETALL", "HSET", "MGET", "PING", "PUBLISH", "SADD", "SET")
    + ("SMEMBERS", "SREM", "XRANGE", "ZRANGE")
)
NEVER_S = 86_400.0


class Line:
    """Commands in order, replies in order, over one connection.

    A reply that is `timeout_s` late ends the line, and every call on it raises. Nothing is ever sent twice.
    """

    def __init__(self, connection: AbstractConnection, timeout_s: float) -> None:
        self.usable = True
        self._timeout_s = timeout_s
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._watch: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._link = Link(connection, self._settle, self._fail)

    def send(self, command: bytes) -> asyncio.Future[Any]:
        """The reply, later. Cancelling it leaves the line as it is."""
        reply: asyncio.Future[Any] = self._loop.create_future()
        now = self._loop.time()
        if self._watch is None:
            self._watch = self._loop.call_at(now + self._timeout_s, self._check)
        self._waiting.append((reply, now))
        self._link.send(command)
        return reply

    async def close(self) -> None:
        self._link.end(RedisConnectionError("the client was closed"))
        await self._link.ended()

    def _settle(self, reply: Any) -> None:
        if not self._waiting:
            raise InvalidResponse(f"a reply without a command: {reply!r}")
        future, _ = self._waiting.popleft()
        if isinstance(reply, ReadOnlyError):
            # A demoted primary: the next call connects anew, and finds the new one.
            self.usable = False
        if future.done():
            return
        if isinstance(reply, Exception):
            future.set_exception(reply)
        else:
            future.set_result(reply)

    def _check(self) -> None:
        self._watch = None
        if not self._waiting:
            return
        due = self._waiting[0][1] + self._timeout_s
        if due <= self._loop.time():
            self._link.end(RedisTimeoutError("Timeout reading from socket"))
        else:
            self._watch = self._loop.call_at(due, self._check)

    def _fail(self, error: Exception) -> None:
        self.usable = False
        if self._watch is not None:
            self._watch.cancel()
        waiting, self._waiting = self._waiting, deque()
        for future, _ in waiting:
            if not future.done():
                future.set_exception(error)


class PipelinedRedis(Redis):
    """redis-py's client, with the SHARED commands on a line. Its pool must not decode replies."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._line: Line | None = None
        self._opening = asyncio.Lock()
        self._callbacks: dict[str, Any] = {}

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        name = args[0]
        if name not in SHARED:
            return await super().execute_command(*args, **options)
        command = packed(*args)
        line = self._line
        if line is None or not line.usable:
            line = await self._open()
        reply = await line.send(command)
        if name not in self._callbacks:
            self._callbacks[name] = self.response_callbacks.get(name)
        callback = self._callbacks[name]
        options.pop("keys", None)
        return callback(reply, **options) if callback else reply

    def sent(self, *command: Any) -> asyncio.Future[Any] | None:
        """Sends a short command at once, without a turn of the event loop, and answers its reply, later. None when
        the line isn't open: then `execute_command` opens it. Raises what makes no bytes of the command."""
        line = self._line
        return line.send(packed(*command)) if line is not None and line.usable else None

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        line, self._line = self._line, None
        if line is not None:
            await line.close()
        await super().aclose(close_connection_pool)

    async def _open(self) -> Line:
        async with self._opening:
            if self._line is not None:
                if self._line.usable:
                    return self._line
                await self._line.close()
            connection = await connected(self.connection_pool)
            self._line = Line(connection, connection.socket_timeout or NEVER_S)
            return self._line
