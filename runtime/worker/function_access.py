"""What a function is given to call other functions with: the gateway's address, and a key of its owner's that ends with
the replica."""

import asyncio
import contextlib

from redis.exceptions import RedisError

from stoker.runtime.tenancy.passes import LASTS_S, Pass, Passes


class FunctionAccess:
    def __init__(self, passes: Passes, url: str) -> None:
        self._passes = passes
        self._url = url
        self._renewing: asyncio.Task[None] | None = None
        self._pass: Pass | None = None

    async def open(self, owner: str) -> dict[str, str]:
        """The variables that `stoker.Client()` reads. None where the gateway's address isn't known."""
        if not self._url:
            return {}
        self._pass = await self._passes.issue(owner)
        if self._pass is None:
            return {"STOKER_URL": self._url}
        self._renewing = asyncio.create_task(self._renew(self._pass))
        return {"STOKER_URL": self._url, "STOKER_API_KEY": self._pass.text}

    async def close(self) -> None:
        if self._renewing:
            self._renewing.cancel()
        if self._pass:
            with contextlib.suppress(RedisError):
                await self._passes.end(self._pass)

    async def _renew(self, issued: Pass) -> None:
        while True:
            await asyncio.sleep(LASTS_S / 4)
            with contextlib.suppress(RedisError):
                await self._passes.renew(issued)
