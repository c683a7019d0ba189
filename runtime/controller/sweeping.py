"""Sweeps of the object store that a controller repeats beside its decisions, for as long as it lives."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from stoker.coldstart.failures import ColdStartError
from stoker.coldstart.store import ObjectStore
from stoker.queue.broker import Broker
from stoker.queue.cluster import Cluster
from stoker.runtime.controller.bundle_sweep import BundleSweep
from stoker.runtime.controller.payload_sweep import sweep as sweep_payloads
from stoker.runtime.controller.prompt_sweep import sweep_prompts

SWEEP_S, BUNDLES_S = 60.0, 600.0

log = logging.getLogger("stoker.controller")


def sweeps(store: ObjectStore, broker: Broker, cluster: Cluster) -> list[Coroutine[Any, Any, None]]:
    """All of them; code bundles are looked at at once, because their time of grace begins with that."""
    payloads, prompts = partial(sweep_payloads, store, broker), partial(sweep_prompts, store, cluster)
    return [
        sweep_forever(payloads, "payloads and results of jobs that are over", SWEEP_S, SWEEP_S),
        sweep_forever(prompts, "kept prompts of functions that are gone", SWEEP_S, SWEEP_S),
        sweep_forever(BundleSweep(store, cluster).sweep, "code bundles that nothing needs", 0, BUNDLES_S),
    ]


async def sweep_forever(sweep: Callable[[], Awaitable[int]], what: str, first_s: float, every_s: float) -> None:
    """`sweep` says how many it has deleted; one that fails with a ColdStartError or RedisError is tried again when the
    next one is due. The first is after `first_s`."""
    await asyncio.sleep(first_s)
    while True:
        try:
            if deleted := await sweep():
                log.info("deleted %d %s", deleted, what)
        except (ColdStartError, RedisError) as error:
            log.warning("sweep of %s: %s", what, error)
        await asyncio.sleep(every_s)
