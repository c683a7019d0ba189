"""A pub/sub connection that comes back by itself."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from stoker.queue.client import connect
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
        self._pubsub: PubSub | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, *channels: str) -> None:
        """Returns when the server has confirmed `channels`; raises when it is away."""
        self._channels.update(channels)
        self._client = connect(self._source, max_connections=2) if isinstance(self._source, str) else self._source()
        try:
            await self._open()
            for _ in channels:
                await self._step()
        except BaseException:
            await self.close()
            raise
        self._task = asyncio.create_task(self._run())

    async def subscribe(self, channel: str) -> None:
        """Takes effect at the latest with the next connection; `on_ready` tells when."""
        if channel not in self._channels:
            self._channels.add(channel)
            if self._pubsub is not None:
                # The reading task sees the same broken connection and reconnects with all channels.
                with contextlib.suppress(RedisError, OSError):
                    await self._pubsub.subscribe(channel)

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
        failures = 0
        while True:
            try:
                if self._pubsub is None:
                    await self._open()
                await self._step()
                failures = 0
            except (RedisError, OSError) as error:
                log.debug("subscription lost: %s", error)
                await self._drop()
                await asyncio.sleep(full_jitter(failures, cap=RECONNECT_CAP_S))
                failures += 1

    async def _open(self) -> None:
        assert self._client is not None
        self._pubsub = self._client.pubsub()
        self._heard = time.monotonic()
        await self._pubsub.subscribe(*self._channels)

    async def _drop(self) -> None:
        pubsub, self._pubsub = self._pubsub, None
        if pubsub is not None:
            with contextlib.suppress(RedisError, OSError):
                await pubsub.aclose()  # type: ignore[no-untyped-call]

    async def _step(self) -> None:
        assert self._pubsub is not None
        message: dict[str, Any] | None = await self._pubsub.get_message(timeout=PING_AFTER_S)
        if message is not None:
            self._heard = time.monotonic()
            self._deliver(message)
        elif time.monotonic() - self._heard > DEAD_AFTER_S:
            raise RedisConnectionError("the server answers no ping")
        else:
            await self._pubsub.ping()

    def _deliver(self, message: dict[str, Any]) -> None:
        """A message that can't be handled must not end the subscription for all others."""
        try:
            if message["type"] == "message":
                self._on_message(message["channel"].decode(), message["data"])
            elif message["type"] == "subscribe":
                self._on_ready(message["channel"].decode())
        except Exception:
            log.exception("a message on %r was not understood", message["channel"])
