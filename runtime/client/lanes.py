"""Many requests at once: for each, httpx looks at every connection of its pool, so several small pools take less."""

from urllib.request import getproxies

import httpx

POOLS = 16
UNLIMITED = httpx.Limits(max_connections=None)


class Lanes(httpx.AsyncBaseTransport):
    """A request goes to the first of the least busy pools: one after another, they all use the same connection."""

    def __init__(self) -> None:
        context = httpx.create_ssl_context()
        self._pools = [httpx.AsyncHTTPTransport(verify=context, limits=UNLIMITED) for _ in range(POOLS)]
        self._loads = [0] * POOLS

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        place = self._loads.index(min(self._loads))
        self._loads[place] += 1
        try:
            return await self._pools[place].handle_async_request(request)
        finally:
            self._loads[place] -= 1

    async def aclose(self) -> None:
        for pool in self._pools:
            await pool.aclose()


def lanes() -> Lanes | None:
    """None where the environment names a proxy, which httpx then finds by itself."""
    return None if getproxies() else Lanes()
