"""What the provider of hosts remembers between looks, as pure functions: when each host came and was last seen, and
which pools refuse. It is kept in the queue's server, so that it outlives controllers. All times are Unix seconds."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from stoker.runtime.controller.groups import FailedLaunch, Group, shortage

FIRST_PAUSE_S = 30.0
MAX_PAUSE_S = 600.0
# A group tries its other zones and types by itself before the pool counts as refusing.
SETTLE_S = 10.0
LAUNCH_S = 180.0
CLOCKS_DIFFER_S = 60.0
SEEN_STEP_S = 10.0
BOOTS_KEPT = 5


@dataclass(frozen=True, slots=True)
class Sighting:
    """An instance: when it was first listed, and when its agent was last known to report (0: never)."""

    pool: str
    first: float
    seen: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """`failures` in a row and in all, the last one's reason, and when the pool may be asked again. `asked_at` is the
    last time that more hosts were asked for; `handled` the time of the last failed launch that was counted."""

    failures: int = 0
    failures_total: int = 0
    error: str = ""
    retry_at: float = 0.0
    asked_at: float = 0.0
    handled: float = 0.0
    boots: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class FleetMemory:
    pools: Mapping[str, PoolMemory] = field(default_factory=dict)
    machines: Mapping[str, Sighting] = field(default_factory=dict)

    def pool(self, name: str) -> PoolMemory:
        return self.pools.get(name, PoolMemory())

    def with_pool(self, name: str, pool: PoolMemory) -> "FleetMemory":
        return replace(self, pools={**self.pools, name: pool})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "FleetMemory":
        pools = {name: PoolMemory(**{**p, "boots": tuple(p["boots"])}) for name, p in data.get("pools", {}).items()}
        return cls(pools, {id: Sighting(**sighting) for id, sighting in data.get("machines", {}).items()})


def refused(pool: PoolMemory, error: str, now: float) -> PoolMemory:
    pause = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2**pool.failures)
    return replace(
        pool,
        failures=pool.failures + 1,
        failures_total=pool.failures_total + 1,
        error=error,
        retry_at=now + pause,
    )


def observe(memory: FleetMemory, groups: Sequence[Group], reporting: Collection[str], now: float) -> FleetMemory:
    """After a look at the groups; `reporting` are the hosts whose agents report."""
    listed = {instance.id: group for group in groups for instance in group.instances}
    for id, sighting in memory.machines.items():
        if id not in listed and not sighting.seen:
            error = f"host {id} ended before it reported"
            memory = memory.with_pool(sighting.pool, refused(memory.pool(sighting.pool), error, now))
    machines = {id: sight(memory.machines.get(id), group.pool, id in reporting, now) for id, group in listed.items()}
    for id, sighting in machines.items():
        before = memory.machines.get(id)
        if sighting.seen and not (before and before.seen):
            pool = memory.pool(sighting.pool)
            boots = (*pool.boots, round(now - sighting.first, 1))[-BOOTS_KEPT:]
            memory = memory.with_pool(sighting.pool, replace(pool, failures=0, error="", retry_at=0.0, boots=boots))
    return replace(memory, machines=machines)


def sight(known: Sighting | None, pool: str, reports: bool, now: float) -> Sighting:
    """Written coarsely, so that the memory isn't stored anew at every look."""
    sighting = known or Sighting(pool, now)
    if reports and now - sighting.seen >= SEEN_STEP_S:
        return replace(sighting, seen=now)
    return sighting


def judge(memory: FleetMemory, group: Group, launches: Sequence[FailedLaunch], now: float) -> FleetMemory:
    """After a look at a group's failed launches: whether its pool refuses. A group that has what it wants doesn't."""
    pool = memory.pool(group.pool)
    if len(group.live) >= group.desired or now < pool.retry_at:
        return memory
    waited_s = now - pool.asked_at if pool.asked_at else 0.0
    fresh = [launch for launch in launches if launch.at > max(pool.handled, pool.asked_at - CLOCKS_DIFFER_S)]
    if not fresh:
        late = f"no instance was started in {LAUNCH_S:.0f} s"
        return memory.with_pool(group.pool, refused(pool, late, now)) if waited_s > LAUNCH_S else memory
    zones = {zone for zone in group.zones if any(zone in launch.message for launch in fresh)}
    if len(zones) < len(group.zones) and waited_s < SETTLE_S:
        return memory
    return memory.with_pool(group.pool, replace(refused(pool, shortage(group, fresh), now), handled=fresh[-1].at))
