"""Deletes code bundles from the object store that neither a deployed function nor a kept version of an app needs, and
lets the versions of apps go that are not deployed any more."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from stoker.coldstart.store import ObjectStore
from stoker.queue.cluster import Cluster
from stoker.runtime.spec import full_name, owner_of

# A bundle is written before what needs it: so long must it have been without use, under the eyes of one controller.
GRACE_S = 3600.0
GONE_MS = 7 * 86_400_000
FOLDER, SUFFIX = "bundles/", ".zip"

# A bundle's key and its stored version -> since when nobody needs it (monotonic seconds).
Unused = Mapping[tuple[str, str], float]


def unused(found: Iterable[tuple[str, str]], used: set[str], before: Unused, now: float) -> Unused:
    """One that was needed meanwhile, or written anew, begins again."""
    return {bundle: before.get(bundle, now) for bundle in found if bundle[0] not in used}


def overdue(bundles: Unused, now: float) -> list[str]:
    return [key for (key, _), since in bundles.items() if now - since >= GRACE_S]


class BundleSweep:
    """One controller's. `clock` is monotonic seconds."""

    def __init__(self, store: ObjectStore, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._cluster = cluster
        self._clock = clock
        self._unused: Unused = {}

    async def sweep(self) -> int:
        """How many were deleted. Raises ColdStartError or RedisError."""
        await self._let_apps_go()
        listed = await asyncio.to_thread(lambda: list(self._store.list(FOLDER)))
        found = [(info.key, info.etag) for info in listed if info.key.endswith(SUFFIX)]
        self._unused = unused(found, await self._used(), self._unused, self._clock())
        old = overdue(self._unused, self._clock())
        still_used = await self._used() if old else set()
        gone = [key for key in old if key not in still_used]
        for key in gone:
            await asyncio.to_thread(self._store.delete, key)
        return len(gone)

    async def _let_apps_go(self) -> None:
        deployed = {
            full_name(owner_of(name), str(spec.get("app", "")))
            for name, spec in (await self._cluster.functions()).items()
        }
        for app in set(await self._cluster.apps()) - deployed:
            await self._cluster.let_releases_go(app, GONE_MS)

    async def _used(self) -> set[str]:
        """Keys of the bundles of all versions that are deployed, wanted somewhere, or kept to go back to."""
        specs: list[Mapping[str, Any]] = [*(await self._cluster.functions()).values()]
        specs += (await self._cluster.proven()).values()
        for replicas in (await self._cluster.wanted()).values():
            specs += [record["spec"] for record in replicas.values()]
        for app in await self._cluster.apps():
            for release in (await self._cluster.releases(app)).values():
                specs += release["specs"].values()
        return {f"{FOLDER}{spec['code']}{SUFFIX}" for spec in specs if spec.get("code")}
