"""Who changed what, and when: one entry for every change by a key with scope admin or deploy, in a chain of keyed
hashes, so that an entry that was altered, removed or put in shows, whoever could write to Redis. What it can't show is
that all of it was put back to an earlier state, or begun anew: whoever fears that keeps the last number elsewhere."""

import hashlib
import hmac
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from redis.asyncio import Redis

from stoker.queue.records import pack, unpack
from stoker.runtime.secret import derive

ENTRIES, HEAD = "stoker:{audit}:entries", "stoker:{audit}:head"
PERMANENT = frozenset({ENTRIES, HEAD})
MOST = 10_000

APPEND = """
if (redis.call('GET', KEYS[2]) or '') ~= ARGV[1] then return 0 end
redis.call('RPUSH', KEYS[1], ARGV[2])
redis.call('LTRIM', KEYS[1], -ARGV[4], -1)
redis.call('SET', KEYS[2], ARGV[3])
return 1
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """`at` is Unix seconds, `key_id` "" where no keys are asked for, `action` like "PUT /v1/prices/{function}", and
    `status` its answer's. `number` rises by one; `digest` also covers `before`, the digest of the entry before."""

    number: int
    at: float
    tenant: str
    key_id: str
    action: str
    target: dict[str, str]
    status: int
    before: str = ""
    digest: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Head:
    """The newest entry's number and digest. Without its `seal` it is nobody's word for what the newest entry is."""

    number: int = 0
    digest: str = ""
    seal: str = ""

    @classmethod
    def of(cls, packed: bytes | None) -> "Head":
        return cls(*unpack(packed)) if packed else cls()

    def packed(self) -> bytes:
        return pack([self.number, self.digest, self.seal])


def keyed(key: bytes, said: Any) -> str:
    return hmac.digest(key, json.dumps(said, sort_keys=True).encode(), hashlib.sha256).hex()


def signed(key: bytes, entry: Entry) -> Entry:
    return replace(entry, digest=keyed(key, ["entry", replace(entry, digest="").to_dict()]))


def sealed(key: bytes, head: Head) -> Head:
    return replace(head, seal=keyed(key, ["head", head.number, head.digest]))


def intact(key: bytes, head: Head) -> bool:
    return head == Head() or head == sealed(key, head)


def first_broken(key: bytes, entries: Sequence[Entry], head: Head) -> int:
    """The number of the first entry that isn't what was written, 0 when all are. The oldest that is kept is the first
    of all or the first of the last `MOST`, and says by itself what came before it."""
    first = max(1, head.number - MOST + 1)
    before = entries[0].before if entries and first > 1 else ""
    for expected, entry in enumerate(entries, first):
        if (entry.number, entry.before) != (expected, before) or entry != signed(key, entry):
            return expected
        before = entry.digest
    end = first + len(entries)
    return 0 if (end - 1, before) == (head.number, head.digest) and intact(key, head) else end


class AuditLog:
    """`secret` is the deployment's; without one the chain shows accidents only."""

    def __init__(self, client: Redis, secret: str = "") -> None:
        self._redis: Any = client
        self._key = derive(secret, "audit") if secret else b"no secret"

    async def note(self, tenant: str, key_id: str, action: str, target: dict[str, str], status: int) -> None:
        """Goes on from a head that somebody else wrote without a seal of its own, so that it keeps showing."""
        while True:
            packed = await self._redis.get(HEAD)
            last = Head.of(packed)
            entry = Entry(last.number + 1, time.time(), tenant, key_id, action, target, status, last.digest)
            entry = signed(self._key, entry)
            head = Head(entry.number, entry.digest)
            head = sealed(self._key, head) if intact(self._key, last) else head
            arguments = [packed or b"", pack(entry.to_dict()), head.packed(), MOST]
            if await self._redis.eval(APPEND, 2, ENTRIES, HEAD, *arguments):
                return

    async def read(self, limit: int) -> tuple[list[Entry], int]:
        """The newest first, at most `limit`, and the number of the first broken one of all that are kept, or 0."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.lrange(ENTRIES, 0, -1)
            pipe.get(HEAD)
            rows, head = await pipe.execute()
        entries = [Entry(**unpack(row)) for row in rows]
        return entries[::-1][:limit], first_broken(self._key, entries, Head.of(head))
