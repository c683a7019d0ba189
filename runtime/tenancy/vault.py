"""Secrets of functions: encrypted in Redis with a key that only the deployment's secret gives, each bound to its owner
and name. They are read by the workers of their owner's functions alone."""

import time
from base64 import urlsafe_b64encode
from collections.abc import Iterable
from typing import Any

from cryptography.fernet import Fernet, InvalidToken
from redis.asyncio import Redis

from stoker.queue.records import pack, unpack
from stoker.runtime.secret import MIN_CHARACTERS, derive
from stoker.runtime.spec import full_name, owner_of, short_name

VALUES = "stoker:{tenants}:secrets"
PERMANENT = frozenset({VALUES})


class SecretUnreadable(Exception):
    """There is no such secret, or this process can't decrypt it; the message says what to do."""


class Vault:
    """`secret` is the deployment's; without a good one names can be listed, values neither kept nor read."""

    def __init__(self, client: Redis, secret: str) -> None:
        self._redis: Any = client
        usable = len(secret) >= MIN_CHARACTERS
        self._cipher = Fernet(urlsafe_b64encode(derive(secret, "function-secrets"))) if usable else None

    @property
    def usable(self) -> bool:
        return self._cipher is not None

    async def put(self, owner: str, name: str, value: str) -> bool:
        """False: it took the place of an earlier value. Replicas that start from now on get the new one."""
        assert self._cipher is not None
        full = full_name(owner, name)
        record = pack([time.time(), self._cipher.encrypt(pack([full, value]))])
        return bool(await self._redis.hset(VALUES, full, record))

    async def names(self, owner: str) -> dict[str, float]:
        """When each was set, in Unix seconds."""
        rows = {full.decode(): unpack(record)[0] for full, record in (await self._redis.hgetall(VALUES)).items()}
        return {short_name(full): set_at for full, set_at in sorted(rows.items()) if owner_of(full) == owner}

    async def remove(self, owner: str, *names: str) -> bool:
        """False when there was none of these."""
        return bool(names and await self._redis.hdel(VALUES, *(full_name(owner, name) for name in names)))

    async def missing(self, owner: str, names: Iterable[str]) -> list[str]:
        known = await self.names(owner)
        return [name for name in names if name not in known]

    async def values(self, owner: str, names: tuple[str, ...]) -> dict[str, str]:
        """Raises SecretUnreadable."""
        if not names:
            return {}
        records = await self._redis.hmget(VALUES, [full_name(owner, name) for name in names])
        return {name: self._opened(owner, name, record) for name, record in zip(names, records, strict=True)}

    def _opened(self, owner: str, name: str, record: bytes | None) -> str:
        if record is None:
            raise SecretUnreadable(f"there is no secret {name!r} any more: store it with `stoker secrets set {name}`")
        if self._cipher is None:
            raise SecretUnreadable(f"this worker can't read secrets: set STOKER_SECRET to the deployment's ({name!r})")
        try:
            full, value = unpack(self._cipher.decrypt(unpack(record)[1]))
        except InvalidToken:
            full = value = ""
        if full != full_name(owner, name):
            raise SecretUnreadable(
                f"the secret {name!r} was stored under another STOKER_SECRET: store it again with "
                f"`stoker secrets set {name}`"
            )
        return value
