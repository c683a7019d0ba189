"""The state of all functions and hosts, read at most once a second however many waiting requests ask for it."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.queue.broker import Broker
from stoker.queue.cluster import Cluster
from stoker.queue.records import Backlog
from stoker.runtime.gateway.registry import Registry
from stoker.runtime.spec import FunctionSpec

FRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`hosts` holds the host agents' report bodies, `wanted_hosts` how many the controller asked for."""

    functions: Mapping[str, FunctionSpec]
    backlogs: Mapping[str, Backlog]
    hosts: list[Mapping[str, Any]]
    wanted_hosts: int


class ClusterView:
    def __init__(self, broker: Broker, cluster: Cluster, registry: Registry) -> None:
        self._broker = broker
        self._cluster = cluster
        self._registry = registry
        self._lock = asyncio.Lock()
        self._last: tuple[float, Snapshot] | None = None

    async def snapshot(self) -> Snapshot:
        async with self._lock:
            if self._last is None or time.monotonic() - self._last[0] > FRESH_S:
                self._last = (time.monotonic(), await self._read())
            return self._last[1]

    async def _read(self) -> Snapshot:
        functions = await self._registry.all()
        backlogs = await self._broker.backlogs(list(functions))
        hosts = await self._cluster.hosts()
        wanted = await self._cluster.hosts_wanted()
        return Snapshot(functions, backlogs, [host.body for host in hosts.values()], len(wanted or []))
