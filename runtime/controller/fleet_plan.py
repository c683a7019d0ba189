"""What an Auto Scaling provider does next: pure functions of the groups, the hosts' reports and the policy's orders."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stoker.runtime.controller.fleet_memory import FleetMemory, Sighting
from stoker.runtime.controller.groups import Group, Instance
from stoker.runtime.controller.policy_state import MachineState

# A host whose agent reported once and then fell silent; systemd restarts an agent well within this.
SILENT_S = 60.0
# What one call may name; the rest has its turn next.
PROTECTED_AT_ONCE = 50

Bodies = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Orders:
    """The policy's last word: good hosts wanted of each pool, hosts to give back, hosts that replicas are wanted on,
    and the number of the look at the groups that it was based on."""

    hosts: Mapping[str, int] = field(default_factory=dict)
    retire: frozenset[str] = frozenset()
    used: frozenset[str] = frozenset()
    look: int = 0


@dataclass(frozen=True, slots=True)
class SetDesired:
    """`before` is what is wanted once the hosts that go are gone."""

    group: Group
    hosts: int
    before: int

    @property
    def raises(self) -> bool:
        return self.hosts > self.before


@dataclass(frozen=True, slots=True)
class Terminate:
    group: Group
    instance: str
    why: str


@dataclass(frozen=True, slots=True)
class LetGo:
    group: Group
    instance: str


@dataclass(frozen=True, slots=True)
class Protect:
    group: Group
    instances: tuple[str, ...]
    protected: bool


Call = SetDesired | Terminate | LetGo | Protect


def state_of(
    instance: Instance, group: Group, sighting: Sighting, body: Mapping[str, Any] | None, now: float
) -> MachineState:
    if instance.state == "leaving":
        return "retiring"
    if not instance.healthy or must_leave(body):
        return "interrupted"
    if body is not None:
        return "ready"
    silent_s = now - sighting.seen if sighting.seen else now - sighting.first
    return "failed" if silent_s > (SILENT_S if sighting.seen else group.boot_timeout_s) else "pending"


def must_leave(body: Mapping[str, Any] | None) -> bool:
    notice = (body or {}).get("notice")
    return bool(notice) and notice["reason"] != "rebalance"


def is_empty(body: Mapping[str, Any] | None) -> bool:
    return body is None or not body["replicas"]


def states(group: Group, memory: FleetMemory, bodies: Bodies, now: float) -> dict[str, MachineState]:
    return {
        instance.id: state_of(
            instance, group, memory.machines.get(instance.id, Sighting(group.pool, now)), bodies.get(instance.id), now
        )
        for instance in group.instances
    }


def plan(groups: Sequence[Group], memory: FleetMemory, bodies: Bodies, orders: Orders | None, now: float) -> list[Call]:
    """Every call can be repeated. Protection first, so that nothing that has work is ever a victim; capacity last.
    Without orders (None) only what needs none is done: broken hosts go, drained ones are let go."""
    made: list[Call] = []
    for group in groups:
        known = states(group, memory, bodies, now)
        made += protections(group, known, bodies, orders) if orders else []
        made += [LetGo(group, i.id) for i in group.instances if i.waits and is_empty(bodies.get(i.id))]
        going = departures(group, known, bodies, orders.retire if orders else frozenset())
        made += going
        left = {each.instance for each in going}
        staying: list[MachineState] = [known[instance.id] for instance in group.live if instance.id not in left]
        if orders and group.pool in orders.hosts:
            refuses = memory.pool(group.pool).retry_at > now or "failed" in known.values()
            made += capacity(group, staying, orders.hosts[group.pool], refuses)
    return made


def departures(
    group: Group, known: Mapping[str, MachineState], bodies: Bodies, retire: frozenset[str]
) -> list[Terminate]:
    """Hosts to terminate, each by name and with one host less wanted. A host with work is never among them."""
    found = []
    for instance in group.live:
        state, empty = known[instance.id], is_empty(bodies.get(instance.id))
        if state == "failed":
            found.append(Terminate(group, instance.id, "it does not report"))
        elif state == "interrupted" and empty:
            found.append(Terminate(group, instance.id, "it has to leave and has nothing to do"))
        elif state == "ready" and empty and instance.id in retire:
            found.append(Terminate(group, instance.id, "it is idle"))
    return found


def capacity(group: Group, staying: Sequence[MachineState], wanted: int, refuses: bool) -> list[SetDesired]:
    """Never below the instances that are there: a group that must choose a victim may choose a busy one. A pool that
    refuses is held at what it has, so that it doesn't start a host that another pool has started meanwhile."""
    bad = sum(state not in ("pending", "ready") for state in staying)
    target = len(staying) if refuses else max(wanted + bad, len(staying))
    target = min(max(target, group.smallest), group.largest)
    before = group.desired - len(group.live) + len(staying)
    return [SetDesired(group, target, before)] if target != before else []


def protections(group: Group, known: Mapping[str, MachineState], bodies: Bodies, orders: Orders) -> list[Protect]:
    """A host is protected from scale-in unless its agent reports that it has nothing, and nothing is to come."""
    idle = {
        instance.id
        for instance in group.live
        if known[instance.id] == "ready" and is_empty(bodies.get(instance.id)) and instance.id not in orders.used
    }
    on = tuple(i.id for i in group.live if i.id not in idle and not i.protected)
    off = tuple(i.id for i in group.live if i.id in idle and i.protected)
    return [Protect(group, ids[:PROTECTED_AT_ONCE], ids is on) for ids in (on, off) if ids]
