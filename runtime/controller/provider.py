"""Where hosts come from. `local`: this machine's supervisor starts the host agents that are written down here."""

from collections.abc import Mapping
from typing import Protocol

from stoker.queue.cluster import Cluster, Host


class Provider(Protocol):
    """Brings the real hosts closer to the wanted ones; called at every sweep, so it must be idempotent and quick."""

    async def reconcile(self, hosts: Mapping[str, Host]) -> None: ...


class LocalProvider:
    """A fixed number of host agents on this machine; `stoker up` keeps them running."""

    def __init__(self, cluster: Cluster, hosts: int) -> None:
        self._cluster = cluster
        self._wanted = [f"local-{index}" for index in range(hosts)]

    async def reconcile(self, hosts: Mapping[str, Host]) -> None:
        if await self._cluster.hosts_wanted() != self._wanted:
            await self._cluster.want_hosts(self._wanted)
