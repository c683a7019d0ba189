"""A pub/sub connection that comes back by itself."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from stoker.queue.client import connect
from stoker.queue.link import Link, connected, packed
from stoker.queue.retry import full_jitter

Source = str | Callable[[], Redis]

PING_AFTER_S = 3.0
DEAD_AFTER_S = 10.0
RECONNECT_CAP_S = 0.5

log = logging.getLogger(__name__)


class Subscriber:
    """`on_message(channel, data)` for each message; `on_ready(channel)` whenever the server confirmed a subscription.

    Messages that were published while the connection was away are lost, which `on_ready` tells. A connection on which
    not even a ping is answered for DEAD_AFTER_S is given up.
    """

    def __init__(
        self, source: Source, on_message: Callable[[str, bytes], None], on_ready: Callable[[str], None]
    ) -> None:
        self._source = source
        self._on_message = on_message
        self._on_ready = on_ready
        self._channels: set[str] = set()
        self._client: Redis | None = None
        self._link: Link | None = None
        self._ended: asyncio.Future[Exception]
        self._confirmed = asyncio.Event()
        self._heard = 0.0
        self._failures = 0
        self._task: asyncio.Task[None] | None = None

    async def start(self, *channels: str) -> None:
        """Returns when the server has confirmed `channels`; raises when it is away."""
        self._channels.update(channels)
        self._client = connect(self._source, max_connections=2) if isinstance(self._source, str) else self._source()
        try:
            await self._open()
            await self._confirmation()
        except BaseException:
            await self.close()
            raise
        self._task = asyncio.create_task(self._run())

    async def subscribe(self, channel: str) -> None:
        """Takes effect at the latest with the next connection; `on_ready` tells when."""
        if channel not in self._channels:
            self._channels.add(channel)
            if self._link is not None:
                self._link.send(packed("SUBSCRIBE", channel))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self._drop()
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _run(self) -> None:
        while True:
            try:
                if self._link is None:
                    await self._open()
                await self._watch()
            except (RedisError, OSError) as error:
                log.debug("subscription lost: %s", error)
                await self._drop()
                await asyncio.sleep(full_jitter(self._failures, cap=RECONNECT_CAP_S))
                self._failures += 1

    async def _open(self) -> None:
        assert self._client is not None
        connection = await connected(self._client.connection_pool)
        self._heard = time.monotonic()
        self._confirmed.clear()
        self._ended = asyncio.get_running_loop().create_future()
        self._link = Link(connection, self._on_reply, self._ended.set_result)
        self._link.send(packed("SUBSCRIBE", *self._channels))

    async def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.end(RedisConnectionError("closed"))
            await link.ended()

    async def _confirmation(self) -> None:
        confirmed = asyncio.ensure_future(self._confirmed.wait())
        try:
            await asyncio.wait((confirmed, self._ended), timeout=DEAD_AFTER_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            confirmed.cancel()
        if self._ended.done():
            raise self._ended.result()
        if not self._confirmed.is_set():
            raise RedisTimeoutError("the subscription is not confirmed")

    async def _watch(self) -> None:
        """Raises when the connection is over, or seems to be."""
        assert self._link is not None
        while True:
            await asyncio.wait((self._ended,), timeout=PING_AFTER_S)
            if self._ended.done():
                raise self._ended.result()
            silent_s = time.monotonic() - self._heard
            if silent_s > DEAD_AFTER_S:
                raise RedisConnectionError("the server answers no ping")
            if silent_s >= PING_AFTER_S:
                self._link.send(packed("PING"))

    def _on_reply(self, reply: Any) -> None:
        self._heard = time.monotonic()
        if isinstance(reply, Exception):
            assert self._link is not None
            self._link.end(reply)
            return
        kind, channel, *data = reply
        # A message that can't be handled must not end the subscription for all others.
        try:
            if kind == b"message":
                self._on_message(channel.decode(), data[0])
            elif kind == b"subscribe":
                self._on_subscribed(channel.decode(), data[0])
        except Exception:
            log.exception("a message on %r was not understood", channel)

    def _on_subscribed(self, channel: str, count: int) -> None:
        self._failures = 0
        if count >= len(self._channels):
            self._confirmed.set()
        self._on_ready(channel)
