"""The state of all functions and hosts, read at most once a second however many waiting requests ask for it."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker.queue.broker import Broker
from stoker.queue.cluster import Cluster
from stoker.queue.records import Backlog, Job
from stoker.runtime.gateway.eta import eta_s
from stoker.runtime.gateway.registry import Registry
from stoker.runtime.gateway.waiting import of_version, replicas_of, wait_reason, why_aside
from stoker.runtime.spec import FunctionSpec

FRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`hosts` holds the host agents' report bodies, `wanted_hosts` how many the controller asked for, `failing` the
    functions whose workers could not start and wait for their next try, `fleet` the controller's report of hosts,
    `proven` the record of each function's version that was ready last."""

    functions: Mapping[str, FunctionSpec]
    backlogs: Mapping[str, Backlog]
    hosts: list[Mapping[str, Any]]
    wanted_hosts: int
    failing: Mapping[str, Any]
    fleet: Mapping[str, Any] = field(default_factory=dict)
    proven: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def why_waiting(self, job: Job) -> str:
        spec = self.functions.get(job.function)
        failing = self.failing.get(job.function)
        needs_gpu = bool(spec and spec.gpu)
        reason = self.fleet.get("reasons", {}).get(job.function)
        backlog, kept_for = self.backlogs.get(job.function), spec.version if spec and job.aside else ""
        hosts = [of_version(host, kept_for) for host in self.hosts] if kept_for else self.hosts
        why = wait_reason(job, backlog, hosts, self.wanted_hosts, failing, needs_gpu, reason)
        return why_aside(kept_for, why) if kept_for else why

    def eta_s(self, job: Job) -> float | None:
        replicas = replicas_of(self.hosts, job.function)
        backlog, reason = self.backlogs.get(job.function), self.fleet.get("reasons", {}).get(job.function)
        return eta_s(job, backlog, replicas, reason, failing=job.function in self.failing)


class ClusterView:
    def __init__(self, broker: Broker, cluster: Cluster, registry: Registry) -> None:
        self._broker = broker
        self._cluster = cluster
        self._registry = registry
        self._started = 0.0
        self._reading: asyncio.Task[Snapshot] | None = None

    async def snapshot(self) -> Snapshot:
        """All who ask during one read share it, also when it fails."""
        if self._reading is None or (self._reading.done() and self._is_stale(self._reading)):
            self._started = time.monotonic()
            self._reading = asyncio.create_task(self._read())
            self._reading.add_done_callback(failed)
        return self._reading.result() if self._reading.done() else await asyncio.shield(self._reading)

    def _is_stale(self, reading: asyncio.Task[Snapshot]) -> bool:
        return failed(reading) or time.monotonic() - self._started > FRESH_S

    async def _read(self) -> Snapshot:
        functions = await self._registry.all()
        backlogs, hosts, wanted, failing, fleet, proven = await asyncio.gather(
            self._broker.backlogs(list(functions)),
            self._cluster.hosts(),
            self._cluster.hosts_wanted(),
            self._cluster.failing(),
            self._cluster.fleet(),
            self._cluster.proven(),
        )
        bodies: list[Mapping[str, Any]] = [host.body for host in hosts.values()]
        return Snapshot(functions, backlogs, bodies, len(wanted or []), failing, fleet, proven)


def failed(reading: asyncio.Task[Snapshot]) -> bool:
    return reading.cancelled() or reading.exception() is not None
