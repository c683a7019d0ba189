"""The controller's lease as its holder sees it. What can't be made conditional on the lease (a call to a cloud) is only
begun while the lease is sure to outlast it."""

import time

from redis.exceptions import RedisError

from stoker.queue.cluster import Cluster

LEASE_MS = 3_000
# A confirmed lease lasts as long as the call, the time that it has to begin, and what is lost on the way.
BEGIN_S = 1.0
MARGIN_S = 0.5


class NotLeading(Exception):
    """Another controller has the lease, or this one's has run out."""


class Leadership:
    """One controller's candidacy; `fence` is the number of its current term, 0 when it doesn't lead."""

    def __init__(self, cluster: Cluster, candidate: str) -> None:
        self.candidate = candidate
        self.fence = 0
        self._cluster = cluster

    async def acquire(self) -> bool:
        """Takes or renews the lease. Raises RedisError, and then doesn't lead."""
        try:
            self.fence = await self._cluster.acquire_leadership(self.candidate, LEASE_MS)
        except RedisError:
            self.fence = 0
            raise
        return self.fence > 0

    async def confirm(self, lasts_s: float) -> float:
        """Until when (time.monotonic) a call that takes up to `lasts_s` may begin. Raises NotLeading or RedisError."""
        asked, fence = time.monotonic(), self.fence
        ttl_s = lasts_s + BEGIN_S + MARGIN_S
        if not fence or not await self._cluster.confirm_leadership(self.candidate, fence, int(ttl_s * 1000)):
            raise NotLeading(f"{self.candidate} doesn't lead any more")
        return asked + BEGIN_S

    async def release(self) -> None:
        self.fence = 0
        await self._cluster.release_leadership(self.candidate)
