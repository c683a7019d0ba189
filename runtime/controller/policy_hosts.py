"""Where replicas go, which hosts are asked for and which are given back: pure functions.

Cheapest pool first, full hosts before empty ones, so that empty ones can go; a pool that refused is left alone until
its `retry_at` and the next cheapest is asked meanwhile. Hosts that no pool has are shared out evenly.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stoker.runtime.controller.policy_memory import pool_fits, typical
from stoker.runtime.controller.policy_state import Machine, Placed, Pool, View
from stoker.runtime.spec import FunctionSpec


@dataclass
class Spot:
    """A device of a running host, and how many replicas are on it and on its whole host."""

    host: str
    device: str
    pool: Pool | None
    load: int = 0
    host_load: int = 0

    @property
    def free(self) -> bool:
        return self.pool is None or self.load < self.pool.slots

    @property
    def rank(self) -> tuple[float, int, int]:
        return (self.pool.replica_price_per_h, -self.host_load, self.load) if self.pool else (0.0, 0, self.load)


@dataclass
class Fleet:
    """One pool during a decision: good hosts, seats of those that still boot, and new ones that are asked for."""

    pool: Pool
    listed: int
    coming: int
    seats: int
    blocked: bool
    new: int = 0

    @property
    def count(self) -> int:
        return self.listed + self.coming + self.new


def usable(view: View) -> dict[str, Pool | None]:
    """Live hosts that may go on serving, with their pools."""
    pools = {pool.name: pool for pool in view.pools}
    machines = {machine.id: machine for machine in view.machines}
    return {
        host: pools.get(machines[host].pool) if host in machines else None
        for host in sorted(view.hosts)
        if host not in machines or machines[host].good
    }


def spots(view: View, keep: Iterable[Placed]) -> list[Spot]:
    loads = Counter((replica.host, replica.device) for replica in keep)
    found = []
    for host, pool in usable(view).items():
        devices = dict.fromkeys(view.hosts[host])
        host_load = sum(loads[host, device] for device in devices)
        found += [Spot(host, device, pool, loads[host, device], host_load) for device in devices]
    return found


def fits(spec: FunctionSpec, spot: Spot) -> bool:
    if spot.pool is None:
        return not spec.gpu or spot.device != "cpu"
    return pool_fits(spec.gpu, spot.pool.gpu, (spot.device,))


def has_seat(spec: FunctionSpec, free: Sequence[Spot]) -> bool:
    return any(spot.free and fits(spec, spot) for spot in free)


def place(
    view: View, keep: Iterable[Placed], functions: Iterable[str]
) -> tuple[tuple[tuple[str, str, str], ...], list[str]]:
    """(function, host, device) of the new replicas that have a place, and the functions of those that have none."""
    names, placed, unplaced = list(functions), [], []
    free = spots(view, keep) if names else []
    for name in names:
        fitting = [spot for spot in free if spot.free and fits(view.specs[name], spot)]
        if not fitting:
            unplaced.append(name)
            continue
        chosen = min(fitting, key=lambda spot: spot.rank)
        chosen.load += 1
        for spot in free:
            spot.host_load += spot.host == chosen.host
        placed.append((name, chosen.host, chosen.device))
    return tuple(placed), unplaced


def fleets(view: View) -> list[Fleet]:
    """The pools, the cheapest first."""
    return [fleet_of(view, pool) for pool in sorted(view.pools, key=lambda p: (p.replica_price_per_h, p.name))]


def fleet_of(view: View, pool: Pool) -> Fleet:
    """What was asked of a pool that refuses isn't waited for."""
    listed = [machine for machine in view.machines if machine.pool == pool.name and machine.good]
    blocked = pool.retry_at > view.now
    coming = 0 if blocked else max(0, pool.asked - len(listed))
    booting = sum(machine.id not in view.hosts for machine in listed)
    return Fleet(pool, len(listed), coming, (booting + coming) * pool.room, blocked)


def order(view: View, unplaced: Iterable[str]) -> tuple[list[Fleet], list[str]]:
    """The pools with the new hosts that replicas without a place need, and the functions of those that get one."""
    found, awaited = fleets(view), []
    for name in unplaced:
        fitting = [fleet for fleet in found if pool_fits(view.specs[name].gpu, fleet.pool.gpu, fleet.pool.devices)]
        waiting = next((fleet for fleet in fitting if fleet.seats > 0), None)
        if waiting is None:
            waiting = next((f for f in fitting if not f.blocked and f.count < f.pool.max_hosts), None)
            if waiting is None:
                continue
            waiting.new += 1
            waiting.seats += waiting.pool.room
        waiting.seats -= 1
        awaited.append(name)
    for fleet in found:
        if not fleet.blocked:
            fleet.new += max(0, fleet.pool.min_hosts - fleet.count)
    return found, awaited


def empty_since(view: View, used: set[str]) -> dict[str, float]:
    """Hosts of pools without any replica, and since when."""
    return {
        machine.id: view.memory.empty.get(machine.id, view.now)
        for machine in view.machines
        if machine.state == "ready" and machine.id in view.hosts and machine.id not in used
    }


def retired(view: View, ordered: Iterable[Fleet], empty: Mapping[str, float]) -> list[Machine]:
    """Hosts that were empty for long enough and that their pool can spare; the longest empty ones first."""
    going = []
    for fleet in ordered:
        idle = [m for m in view.machines if m.pool == fleet.pool.name and m.id in empty]
        idle = [m for m in idle if view.now - empty[m.id] >= view.rules.host_idle_s]
        spare = max(0, fleet.count - fleet.pool.min_hosts)
        going += sorted(idle, key=lambda m: (empty[m.id], m.id))[:spare]
    return going


def boot_s(view: View, gpu: str) -> float:
    """How long a new host for a function that wants `gpu` takes: as its cheapest pool that can be asked now does."""
    fitting = [f for f in fleets(view) if pool_fits(gpu, f.pool.gpu, f.pool.devices)]
    fitting = [fleet for fleet in fitting if not fleet.blocked] or fitting
    if not fitting:
        return 0.0
    pool = fitting[0].pool
    return typical(view.memory.boots.get(pool.name, ()), pool.boot_s)


def replica_prices(view: View) -> dict[str, float]:
    """Of a replica on each usable host; the nearly finished ones of a pool cost the same as the rest."""
    return {host: pool.replica_price_per_h if pool else 0.0 for host, pool in usable(view).items()}


def seconds(value: float) -> str:
    return f"{max(0, math.ceil(value))} s"
