"""Where batches are kept: their records in Redis for a month, who drives one under a lease, results in the store."""

import time
from typing import Any

from redis.asyncio import Redis

from stoker.queue.records import pack, unpack
from stoker.runtime.batches.batch import Batch

ACTIVE = "stoker:{batches}:active"
PERMANENT = frozenset({ACTIVE})
KEPT_S = 30 * 86_400
LEASE_MS = 4_000

TAKE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

WRITE = """
if ARGV[1] ~= '' and redis.call('GET', KEYS[3]) ~= ARGV[1] then return 0 end
if ARGV[5] ~= '' and redis.call('GET', KEYS[1]) ~= ARGV[5] then return -1 end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
if ARGV[4] == '1' then redis.call('SREM', KEYS[2], KEYS[1]) else redis.call('SADD', KEYS[2], KEYS[1]) end
return 1
"""


def batch_key(tenant: str, batch_id: str) -> str:
    return f"{index_key(tenant)}:{batch_id}"


def index_key(tenant: str) -> str:
    return f"stoker:{{batches}}:of:{tenant}"


class LeaseLost(Exception):
    """Another gateway drives the batch now."""


class BatchShelf:
    def __init__(self, client: Redis) -> None:
        self._redis: Any = client

    async def add(self, batch: Batch) -> None:
        index = index_key(batch.tenant)
        await self._write("", batch, None)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.zadd(index, {batch.id: batch.created_at})
            pipe.zremrangebyscore(index, "-inf", time.time() - KEPT_S)
            pipe.expire(index, KEPT_S)
            await pipe.execute()

    async def get(self, tenant: str, batch_id: str) -> Batch | None:
        data = await self._redis.get(batch_key(tenant, batch_id))
        return Batch(**unpack(data)) if data else None

    async def ids(self, tenant: str) -> list[str]:
        """The newest first."""
        return [name.decode() for name in await self._redis.zrange(index_key(tenant), 0, -1, desc=True)]

    async def remove_all(self, tenant: str) -> None:
        """Whoever drives one of them finds it gone, and stops."""
        keys = [batch_key(tenant, batch_id) for batch_id in await self.ids(tenant)]
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(index_key(tenant), *keys)
            if keys:
                pipe.srem(ACTIVE, *keys)
            await pipe.execute()

    async def active(self) -> list[tuple[str, str]]:
        """(tenant, id) of every batch that isn't over."""
        names = [name.decode().rsplit(":", 2) for name in await self._redis.smembers(ACTIVE)]
        return sorted((tenant, batch_id) for _, tenant, batch_id in names)

    async def reader_of(self, tenant: str, file_id: str) -> str:
        """The id of a batch that isn't over and has this file as its input, "" when none has."""
        own = [batch_id for owner, batch_id in await self.active() if owner == tenant]
        packed = await self._redis.mget([batch_key(tenant, batch_id) for batch_id in own]) if own else []
        batches = [Batch(**unpack(data)) for data in packed if data]
        return next((batch.id for batch in batches if batch.input_file_id == file_id and not batch.over), "")

    async def take(self, batch_id: str, driver: str) -> bool:
        """Takes or renews the right to drive a batch."""
        return bool(await self._redis.eval(TAKE, 1, lease_key(batch_id), driver, LEASE_MS))

    async def leave(self, batch_id: str, driver: str) -> None:
        if await self._redis.get(lease_key(batch_id)) == driver.encode():
            await self._redis.delete(lease_key(batch_id))

    async def change(self, tenant: str, batch_id: str, step: Any, driver: str = "") -> Batch | None:
        """Applies `step` (record -> record) to what is stored now; `driver`, if named, must hold the lease.

        Raises LeaseLost."""
        while True:
            before = await self._redis.get(batch_key(tenant, batch_id))
            if before is None:
                return None
            after = step(Batch(**unpack(before)))
            if await self._write(driver, after, before):
                return after

    async def _write(self, driver: str, batch: Batch, before: bytes | None) -> bool:
        key = batch_key(batch.tenant, batch.id)
        arguments = [driver, pack(batch.to_dict()), KEPT_S, int(batch.over), before or b""]
        answer = await self._redis.eval(WRITE, 3, key, ACTIVE, lease_key(batch.id), *arguments)
        if answer == 0:
            raise LeaseLost(batch.id)
        return answer == 1


def lease_key(batch_id: str) -> str:
    return f"stoker:{{batches}}:lease:{batch_id}"
