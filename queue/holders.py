"""Which hosts hold what others may want from them: announced with a time to live, on the server's clock."""

from collections.abc import Iterable
from typing import Any

from redis.asyncio import Redis

PREFIX = "stoker:holders:"

ANNOUNCE = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
"""

FIND = """
local time = redis.call('TIME')
return redis.call('ZRANGEBYSCORE', KEYS[1], time[1] * 1000 + math.floor(time[2] / 1000), '+inf')
"""


class Holders:
    """`thing` is anything with a name (a model's revision), `address` where its holder is asked for it."""

    def __init__(self, client: Redis) -> None:
        self._redis = client

    async def announce(self, address: str, things: Iterable[str], ttl_ms: int) -> None:
        """To be repeated before `ttl_ms` have passed."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for thing in things:
                pipe.eval(ANNOUNCE, 1, PREFIX + thing, address, ttl_ms)
            await pipe.execute()

    async def find(self, thing: str) -> list[str]:
        """Addresses, the latest announcement last."""
        found: Any = await self._redis.eval(FIND, 1, PREFIX + thing)  # type: ignore[misc]
        return [address.decode() for address in found]

    async def withdraw(self, address: str, things: Iterable[str]) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            for thing in things:
                pipe.zrem(PREFIX + thing, address)
            await pipe.execute()
