"""The functions' logs in Redis: one bounded stream each, that is gone a day after its last line."""

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from redis.asyncio import Redis

from stoker.runtime.logs.line import Line

PREFIX = "stoker:log:"
# Of LINE_BYTES at most: 20 MB in the worst case, usually a twentieth of it.
MOST_LINES = 5_000
KEPT_MS = 86_400_000
PER_READ = 500

Wanted = Callable[[Line], bool]


def log_key(function: str) -> str:
    return f"{PREFIX}{{{function}}}"


class LogBook:
    """By full names of functions. Raises RedisError."""

    def __init__(self, client: Redis) -> None:
        self._redis = client

    async def append(self, function: str, lines: Sequence[Line]) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            for line in lines:
                pipe.xadd(log_key(function), {"l": line.packed()}, maxlen=MOST_LINES, approximate=True)
            pipe.pexpire(log_key(function), KEPT_MS)
            await pipe.execute()

    async def last(self, function: str, limit: int, since_ms: int, wanted: Wanted) -> tuple[list[Line], str]:
        """The last `limit` wanted lines since then, oldest first, and the place behind everything that was read."""
        found: deque[Line] = deque(maxlen=limit)
        place = f"{max(0, since_ms - 1)}-{(1 << 64) - 1}"
        async for line in self.after(function, place):
            place = line.id
            if wanted(line):
                found.append(line)
        return list(found), place

    async def after(self, function: str, place: str) -> AsyncIterator[Line]:
        """All that is there behind a place, oldest first."""
        while True:
            page = await self.page(function, place)
            for line in page:
                place = line.id
                yield line
            if len(page) < PER_READ:
                return

    async def page(self, function: str, place: str) -> list[Line]:
        """The next PER_READ lines behind a place; fewer when there are no more."""
        entries: Any = await self._redis.xrange(log_key(function), min=f"({place}", count=PER_READ)
        return [Line.unpacked(id.decode(), fields[b"l"]) for id, fields in entries]

    async def forget(self, function: str) -> None:
        await self._redis.delete(log_key(function))
