"""The tenants, keys and prices that Redis holds. A key is found by its id, which says nothing about its secret."""

import time
from dataclasses import replace
from typing import Any

from redis.asyncio import Redis

from stoker.queue.records import pack, unpack
from stoker.runtime.tenancy.api_key import KeyRecord
from stoker.runtime.tenancy.price import Price
from stoker.runtime.tenancy.tenant import Tenant

TENANTS = "stoker:{tenants}:records"
KEYS = "stoker:{tenants}:keys"
PASS_PREFIX = "stoker:{tenants}:pass:"
PRICES = "stoker:{tenants}:prices"
TYPICAL = "stoker:{tenants}:typical"
PERMANENT = frozenset({TENANTS, KEYS, PRICES, TYPICAL})
EVERY_FUNCTION = "*"
TYPICAL_OF = 4

REMOVE = """
for i = 2, #ARGV do redis.call('HDEL', KEYS[2], ARGV[i]) end
return redis.call('HDEL', KEYS[1], ARGV[1])
"""


class Directory:
    """Everything here is one round trip and safe to repeat."""

    def __init__(self, client: Redis) -> None:
        self._redis: Any = client

    async def create(self, tenant: Tenant) -> bool:
        """False when the name is taken."""
        return bool(await self._redis.hsetnx(TENANTS, tenant.name, pack(tenant.to_dict())))

    async def put(self, tenant: Tenant) -> None:
        await self._redis.hset(TENANTS, tenant.name, pack(tenant.to_dict()))

    async def get(self, name: str) -> Tenant | None:
        data = await self._redis.hget(TENANTS, name)
        return Tenant.from_dict(unpack(data)) if data else None

    async def all(self) -> list[Tenant]:
        rows = await self._redis.hgetall(TENANTS)
        return sorted((Tenant.from_dict(unpack(data)) for data in rows.values()), key=lambda tenant: tenant.name)

    async def revoke_all(self, name: str) -> None:
        if ids := [record.id for record in await self.keys_of(name)]:
            await self._redis.hdel(KEYS, *ids)

    async def remove(self, name: str) -> bool:
        """The tenant and all of its keys, in one step."""
        ids = [record.id for record in await self.keys_of(name)]
        return bool(await self._redis.eval(REMOVE, 2, TENANTS, KEYS, name, *ids))

    async def key(self, key_id: str) -> KeyRecord | None:
        data = await self._redis.hget(KEYS, key_id) or await self._redis.get(PASS_PREFIX + key_id)
        return KeyRecord.from_dict(unpack(data)) if data else None

    async def put_pass(self, record: KeyRecord, lasts_s: float) -> None:
        """A key that no list shows and that nobody has to revoke."""
        await self._redis.set(PASS_PREFIX + record.id, pack(record.to_dict()), px=round(lasts_s * 1000))

    async def end_pass(self, key_id: str) -> None:
        await self._redis.delete(PASS_PREFIX + key_id)

    async def keys_of(self, tenant: str) -> list[KeyRecord]:
        """Living ones, the oldest first; what has expired is forgotten here."""
        records = [KeyRecord.from_dict(unpack(data)) for data in (await self._redis.hgetall(KEYS)).values()]
        now = time.time()
        if dead := [record.id for record in records if not record.alive(now)]:
            await self._redis.hdel(KEYS, *dead)
        own = (record for record in records if record.tenant == tenant and record.alive(now))
        return sorted(own, key=lambda record: record.created_at)

    async def put_key(self, record: KeyRecord) -> None:
        await self._redis.hset(KEYS, record.id, pack(record.to_dict()))

    async def rotate(self, old: KeyRecord, new: KeyRecord, overlap_s: float) -> None:
        """The old key works for `overlap_s` more seconds, and no longer than it would have without a new one."""
        over = time.time() + overlap_s
        ending = replace(old, expires_at=min(over, old.expires_at or over))
        rows = {new.id: pack(new.to_dict()), old.id: pack(ending.to_dict())}
        await self._redis.hset(KEYS, mapping=rows)

    async def revoke(self, key_id: str) -> bool:
        return bool(await self._redis.hdel(KEYS, key_id))

    async def price(self, function: str) -> Price:
        """Of one function by its full name, else the one for every function."""
        own, common = await self._redis.hmget(PRICES, function, EVERY_FUNCTION)
        return Price.from_dict(unpack(own or common)) if own or common else Price()

    async def typical(self, function: str) -> int:
        """What a call of the function has cost lately, in micro-USD; 0 while that isn't known."""
        return int(await self._redis.hget(TYPICAL, function) or 0)

    async def note_costs(self, function: str, costs: list[int]) -> None:
        """Of calls that were entered. Two ledgers at once may count one of them twice, which does no harm here."""
        before = await self.typical(function)
        mean = sum(costs) / len(costs)
        await self._redis.hset(TYPICAL, function, round(before + (mean - before) / TYPICAL_OF if before else mean))

    async def prices(self) -> dict[str, Price]:
        rows = await self._redis.hgetall(PRICES)
        return {name.decode(): Price.from_dict(unpack(data)) for name, data in sorted(rows.items())}

    async def put_price(self, function: str, price: Price) -> None:
        await self._redis.hset(PRICES, function, pack(price.to_dict()))

    async def remove_price(self, function: str) -> bool:
        return bool(await self._redis.hdel(PRICES, function))
