"""The fleet of an Auto Scaling provider as the policy and as people see it: pure functions."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.runtime.controller.fleet_memory import FleetMemory, Sighting
from stoker.runtime.controller.fleet_plan import Bodies, states
from stoker.runtime.controller.groups import Group
from stoker.runtime.controller.policy_state import Machine, MachineState, Pool
from stoker.runtime.controller.provider import Fleet

BOOT_S = 120.0


def fleet_of(
    groups: Sequence[Group],
    memory: FleetMemory,
    bodies: Bodies,
    now: float,
    clock: float,
) -> Fleet:
    """`now` is the policy's clock at the wall clock's `clock`."""
    pools, machines, rows = [], [], []
    for group in groups:
        known = states(group, memory, bodies, clock)
        pools.append(pool_of(group, memory, known, now - clock))
        for id, state in known.items():
            since = memory.machines.get(id, Sighting(group.pool, clock)).first
            machines.append(Machine(id, group.pool, state, since + now - clock))
        rows.append(pool_row(group, memory, known))
    return Fleet(tuple(pools), tuple(machines), tuple(rows))


def pool_of(group: Group, memory: FleetMemory, known: Mapping[str, MachineState], shift_s: float) -> Pool:
    remembered = memory.pool(group.pool)
    bad = sum(known[instance.id] not in ("pending", "ready") for instance in group.live)
    boots = sorted(remembered.boots)
    return Pool(
        group.pool,
        price_per_h=group.price,
        spot=group.spot,
        devices=tuple(f"cuda:{index}" for index in range(group.gpus)) if group.gpu else ("cpu",),
        gpu=group.gpu,
        min_hosts=group.smallest,
        max_hosts=group.largest,
        boot_s=boots[len(boots) // 2] if boots else BOOT_S,
        asked=group.desired - bad,
        retry_at=remembered.retry_at + shift_s if remembered.retry_at else 0.0,
        error=remembered.error,
    )


def pool_row(group: Group, memory: FleetMemory, known: Mapping[str, MachineState]) -> dict[str, Any]:
    remembered = memory.pool(group.pool)
    return {
        "pool": group.pool,
        "group": group.name,
        "gpu": group.gpu,
        "gpus": group.gpus,
        "price_per_h": group.price,
        "spot": group.spot,
        "min": group.smallest,
        "max": group.largest,
        "desired": group.desired,
        "states": dict(Counter(known.values())),
        "failures": remembered.failures_total,
        "error": remembered.error,
        "retry_at": remembered.retry_at,
    }
