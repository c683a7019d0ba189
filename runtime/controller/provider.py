"""Where hosts come from. `local`: this machine's supervisor starts the host agents that are written down here."""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from redis.exceptions import RedisError

from stoker.queue.cluster import Cluster, Host
from stoker.runtime.controller.fleet_plan import Orders
from stoker.runtime.controller.policy_state import Machine, Pool

LOOK_S = 0.25


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a provider has, for the policy (times on the controller's monotonic clock) and, in `report`, for people.
    `trouble` says why hosts can't be had just now, whatever the policy wants; `look` numbers what this was seen in."""

    pools: tuple[Pool, ...] = ()
    machines: tuple[Machine, ...] = ()
    report: tuple[Mapping[str, Any], ...] = ()
    trouble: str = ""
    look: int = 0


class Provider(Protocol):
    """Brings the real hosts closer to the wanted ones, in a task of its own: nothing here makes a sweep wait for a
    cloud. What must outlive the controller is kept in the queue's server or by the cloud."""

    async def run(self) -> None:
        """Until it is cancelled; what was begun is ended first."""

    def fleet(self, hosts: Mapping[str, Host]) -> Fleet:
        """As of the last look."""
        ...

    def order(self, orders: Orders) -> None:
        """Given at every sweep of the leading controller; the last one counts."""


class LocalProvider:
    """A fixed number of host agents on this machine, kept running by `stoker up`. 0: agents are started elsewhere."""

    def __init__(self, cluster: Cluster, hosts: int) -> None:
        self._cluster = cluster
        self._wanted = [f"local-{index}" for index in range(hosts)]

    async def run(self) -> None:
        while True:
            with contextlib.suppress(RedisError):
                if await self._cluster.hosts_wanted() != self._wanted:
                    await self._cluster.want_hosts(self._wanted)
            await asyncio.sleep(LOOK_S)

    def fleet(self, hosts: Mapping[str, Host]) -> Fleet:
        return Fleet()

    def order(self, orders: Orders) -> None: ...
