"""Deletes what was kept of prompts from the object store once the function is gone that they were asked of."""

import asyncio

from stoker.coldstart.store import ObjectStore
from stoker.queue.cluster import Cluster
from stoker.runtime.stored_prompts import PREFIX, function_of


async def sweep_prompts(store: ObjectStore, cluster: Cluster) -> int:
    """How many were deleted. Raises ColdStartError or RedisError."""
    kept = await asyncio.to_thread(lambda: [found.key for found in store.list(PREFIX)])
    deployed = await cluster.functions() if kept else {}
    gone = [key for key in kept if function_of(key) not in deployed]
    for key in gone:
        await asyncio.to_thread(store.delete, key)
    return len(gone)
