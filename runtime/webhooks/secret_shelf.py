"""What Redis knows of tenants' webhooks: the salts of their secrets, and URLs that want to hear no more."""

import hashlib
import secrets
import time
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from stoker.queue.records import pack, unpack
from stoker.runtime.webhooks.signing import secret_text

SALTS = "stoker:{webhooks}:salts"
PERMANENT = frozenset({SALTS})
GONE_S = 30 * 86_400

SWAP = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
"""


@dataclass(frozen=True, slots=True)
class Secrets:
    """`previous` also signs, until `previous_until` (Unix seconds); "" when there is none."""

    current: str
    previous: str = ""
    previous_until: float = 0.0

    @property
    def valid(self) -> list[str]:
        return [self.current, self.previous] if self.previous else [self.current]


class SecretShelf:
    """`secret` is the deployment's."""

    def __init__(self, client: Redis, secret: str) -> None:
        self._redis: Any = client
        self._secret = secret

    async def secrets_of(self, tenant: str) -> Secrets:
        """Made on first use."""
        salt, old, until = unpack(await self._salts(tenant))
        if not old or until <= time.time():
            return Secrets(secret_text(self._secret, tenant, salt))
        return Secrets(secret_text(self._secret, tenant, salt), secret_text(self._secret, tenant, old), until)

    async def rotate(self, tenant: str, overlap_s: float) -> Secrets:
        """A new secret; the last one also signs for `overlap_s` more seconds. Two at once are one after the other."""
        while True:
            before = await self._salts(tenant)
            salt, _, _ = unpack(before)
            after = pack([secrets.token_bytes(16), salt, time.time() + overlap_s])
            if await self._redis.eval(SWAP, 1, SALTS, tenant, before, after):
                return await self.secrets_of(tenant)

    async def forget(self, tenant: str) -> None:
        """Who comes later under this name gets a secret of its own."""
        await self._redis.hdel(SALTS, tenant)

    async def disable(self, tenant: str, url: str) -> None:
        await self._redis.set(gone_key(tenant, url), b"", ex=GONE_S)

    async def enable(self, tenant: str, url: str) -> None:
        await self._redis.delete(gone_key(tenant, url))

    async def is_disabled(self, tenant: str, url: str) -> bool:
        return bool(await self._redis.exists(gone_key(tenant, url)))

    async def _salts(self, tenant: str) -> bytes:
        """The salt, the one before and until when that is good."""
        if found := await self._redis.hget(SALTS, tenant):
            return found
        await self._redis.hsetnx(SALTS, tenant, pack([secrets.token_bytes(16), b"", 0.0]))
        return await self._redis.hget(SALTS, tenant)


def gone_key(tenant: str, url: str) -> str:
    return f"stoker:webhooks:gone:{hashlib.blake2b(f'{tenant} {url}'.encode(), digest_size=16).hexdigest()}"
