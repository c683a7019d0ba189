"""Responses that clients may come back to, each with its whole conversation, in Redis for as long as results are kept.

A conversation fits into its model's context, so that what is kept is bounded by the requests of that time.
"""

import zlib
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from stoker.queue.records import pack, unpack
from stoker.queue.retry import insist
from stoker.runtime.gateway.response_objects import ResponseObject
from stoker.runtime.gateway.response_schema import Item
from stoker.runtime.tenancy.tenant import Tenant

PATIENCE_S = 2.0


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`conversation`: the items that a next request goes on from, this response's own among them."""

    response: ResponseObject
    conversation: list[Item]


class ResponseShelf:
    """What a tenant can't name is as unknown to it as what never was."""

    def __init__(self, client: Redis) -> None:
        self._redis: Any = client

    async def put(self, account: Tenant, stored: StoredResponse, seconds: float) -> None:
        """Nothing where it is kept already, or was deleted: a request that is repeated doesn't bring it back."""
        data = zlib.compress(pack([stored.response, stored.conversation]), 1)
        key = place(account, stored.response["id"])
        await insist(lambda: self._redis.set(key, data, nx=True, px=max(1, round(seconds * 1000))), PATIENCE_S)

    async def get(self, account: Tenant, response_id: str) -> StoredResponse | None:
        data = await insist(lambda: self._redis.get(place(account, response_id)), PATIENCE_S)
        return StoredResponse(*unpack(zlib.decompress(data))) if data else None

    async def remove(self, account: Tenant, response_id: str) -> bool:
        """What is left has no content, and goes when the response would have gone."""
        key = place(account, response_id)
        return bool(await insist(lambda: self._redis.set(key, b"", xx=True, keepttl=True, get=True), PATIENCE_S))


def place(account: Tenant, response_id: str) -> str:
    """Whoever gets the name of a tenant that was removed is another one."""
    return f"stoker:t:{{{account.name}}}:response:{account.created_at:.3f}:{response_id}"
