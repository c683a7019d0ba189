from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stoker.runtime.controller.fleet_memory import FleetMemory, PoolMemory, Sighting
from stoker.runtime.controller.fleet_plan import (
    SILENT_S,
    Call,
    LetGo,
    Orders,
    Protect,
    SetDesired,
    Terminate,
    plan,
    states,
)
from stoker.runtime.controller.fleet_view import fleet_of
from stoker.runtime.controller.groups import Group, Instance
from stoker.runtime.controller.policy_state import Machine

NOW = 1_000_000.0
IDLE: dict[str, Any] = {"replicas": {}, "notice": None}
BUSY: dict[str, Any] = {"replicas": {"r": {}}, "notice": None}
LEAVES = {"reason": "interruption", "at": NOW + 120}


def instance(id: str, **more: Any) -> Instance:
    return replace(Instance(id, "g6e.xlarge", "a", "running"), **more)


def group(*instances: Instance, desired: int | None = None, **more: Any) -> Group:
    live = sum(each.state != "leaving" for each in instances)
    return Group("g", "p", 0, 8, live if desired is None else desired, instances, **more)


def memory(*ids: str, first: float = NOW - 100, seen: float = NOW - 1, retry_at: float = 0.0) -> FleetMemory:
    return FleetMemory({"p": PoolMemory(retry_at=retry_at)}, {id: Sighting("p", first, seen) for id in ids})


def calls(of: Group, known: FleetMemory, bodies: dict[str, Any], orders: Orders | None) -> list[Call]:
    return plan([of], known, bodies, orders, NOW)


def test_more_hosts_are_asked_for_as_one_number() -> None:
    empty = group()
    (call,) = calls(empty, memory(), {}, Orders({"p": 3}))
    assert call == SetDesired(empty, 3, 0) and isinstance(call, SetDesired) and call.raises
    assert calls(replace(empty, desired=3), memory(), {}, Orders({"p": 3})) == []
    (call,) = calls(empty, memory(), {}, Orders({"p": 30}))
    assert isinstance(call, SetDesired) and call.hosts == empty.largest


def test_without_orders_nothing_is_asked_for_or_given_back() -> None:
    idle = group(instance("i-1"), desired=3)
    assert calls(idle, memory("i-1"), {"i-1": IDLE}, None) == []
    assert calls(idle, memory("i-1"), {"i-1": IDLE}, Orders({"q": 1}, used=frozenset({"i-1"}))) == []


def test_an_idle_host_is_given_back_by_name_and_a_busy_one_never() -> None:
    two = group(instance("i-1"), instance("i-2"))
    orders = Orders({"p": 0}, frozenset({"i-1", "i-2"}), frozenset({"i-1", "i-2"}))
    assert calls(two, memory("i-1", "i-2"), {"i-1": IDLE, "i-2": BUSY}, orders) == [Terminate(two, "i-1", "it is idle")]


def test_the_group_is_never_told_to_choose_a_victim_itself() -> None:
    two = group(instance("i-1"), instance("i-2"), desired=4)
    used = frozenset({"i-1", "i-2"})
    (call,) = calls(two, memory("i-1", "i-2"), {"i-1": BUSY, "i-2": BUSY}, Orders({"p": 0}, used=used))
    assert call == SetDesired(two, 2, 4)


def test_a_pool_that_refuses_is_held_at_what_it_has() -> None:
    short = group(desired=2)
    (call,) = calls(short, memory(retry_at=NOW + 5), {}, Orders({"p": 2}))
    assert call == SetDesired(short, 0, 2)
    assert calls(short, memory(retry_at=NOW - 5), {}, Orders({"p": 2})) == []


def test_a_host_that_never_reported_goes_after_its_time() -> None:
    booting = group(instance("i-1"), boot_timeout_s=200)
    late = memory("i-1", first=NOW - 201, seen=0.0)
    orders = Orders({"p": 1}, used=frozenset({"i-1"}))
    assert calls(booting, memory("i-1", first=NOW - 199, seen=0.0), {}, orders) == []
    assert calls(booting, late, {}, orders) == [Terminate(booting, "i-1", "it does not report")]
    assert calls(booting, late, {}, None) == [Terminate(booting, "i-1", "it does not report")]


def test_a_host_that_fell_silent_goes_after_a_while() -> None:
    silent = group(instance("i-1"))
    assert states(silent, memory("i-1", seen=NOW - SILENT_S + 1), {}, NOW) == {"i-1": "pending"}
    assert states(silent, memory("i-1", seen=NOW - SILENT_S - 1), {}, NOW) == {"i-1": "failed"}


def test_an_interrupted_host_is_replaced_at_once_and_goes_when_it_is_empty() -> None:
    one = group(instance("i-1"))
    orders = Orders({"p": 1}, used=frozenset({"i-1"}))
    assert calls(one, memory("i-1"), {"i-1": {**BUSY, "notice": LEAVES}}, orders) == [SetDesired(one, 2, 1)]
    assert calls(replace(one, desired=2), memory("i-1"), {"i-1": {**IDLE, "notice": LEAVES}}, orders) == [
        Terminate(replace(one, desired=2), "i-1", "it has to leave and has nothing to do")
    ]
    hint = {**BUSY, "notice": {"reason": "rebalance", "at": NOW}}
    assert states(one, memory("i-1"), {"i-1": hint}, NOW) == {"i-1": "ready"}


def test_an_unhealthy_host_counts_as_interrupted() -> None:
    ill = group(instance("i-1", healthy=False))
    assert states(ill, memory("i-1"), {"i-1": BUSY}, NOW) == {"i-1": "interrupted"}
    assert calls(ill, memory("i-1"), {}, None) == [Terminate(ill, "i-1", "it has to leave and has nothing to do")]


def test_a_held_termination_is_completed_once_the_host_has_drained() -> None:
    held = group(instance("i-1", state="leaving", waits=True))
    assert calls(held, memory("i-1"), {"i-1": BUSY}, None) == []
    assert calls(held, memory("i-1"), {"i-1": IDLE}, None) == [LetGo(held, "i-1")]
    assert calls(held, memory("i-1"), {}, None) == [LetGo(held, "i-1")]


def test_protection_follows_work() -> None:
    three = group(instance("i-1"), instance("i-2", protected=False), instance("i-3", protected=False))
    bodies = {"i-1": IDLE, "i-2": BUSY, "i-3": IDLE}
    orders = Orders({"p": 3}, used=frozenset({"i-2", "i-3"}))
    assert calls(three, memory("i-1", "i-2", "i-3"), bodies, orders) == [
        Protect(three, ("i-2", "i-3"), True),
        Protect(three, ("i-1",), False),
    ]


def test_one_call_names_no_more_hosts_than_it_may() -> None:
    ids = [f"i-{n}" for n in range(60)]
    many = group(*(instance(id, protected=False) for id in ids))
    (call,) = calls(many, memory(*ids), dict.fromkeys(ids, BUSY), Orders({"p": 60}))[:1]
    assert isinstance(call, Protect) and call.protected and call.instances == tuple(ids[:50])


hosts = st.lists(
    st.tuples(
        st.sampled_from(["pending", "running", "leaving"]),
        st.booleans(),
        st.sampled_from([None, "idle", "busy", "busy leaving", "idle leaving"]),
        st.booleans(),
    ),
    max_size=5,
)
BODIES = {
    "idle": IDLE,
    "busy": BUSY,
    "busy leaving": {**BUSY, "notice": LEAVES},
    "idle leaving": {**IDLE, "notice": LEAVES},
}


@given(hosts, st.integers(0, 6), st.integers(0, 6), st.booleans(), st.integers(0, 2))
def test_no_host_with_work_is_ever_terminated_and_capacity_stays_in_its_bounds(
    drawn: list[Any], desired: int, wanted: int, refuses: bool, smallest: int
) -> None:
    ids = [f"i-{n}" for n in range(len(drawn))]
    members = [instance(id, state=d[0], healthy=d[1], protected=d[3]) for id, d in zip(ids, drawn, strict=True)]
    bodies = {id: BODIES[d[2]] for id, d in zip(ids, drawn, strict=True) if d[2]}
    of = replace(group(*members, desired=max(desired, smallest)), smallest=smallest)
    known = memory(*ids, seen=0.0, first=NOW - 1000, retry_at=NOW + 9 if refuses else 0.0)
    made = calls(of, known, bodies, Orders({"p": wanted}, frozenset(ids)))
    gone = {call.instance for call in made if isinstance(call, Terminate)}
    assert not any(bodies.get(id, IDLE)["replicas"] for id in gone)
    for call in made:
        if isinstance(call, SetDesired):
            assert smallest <= call.hosts <= of.largest and call.hosts >= len(of.live) - len(gone)
        if isinstance(call, Protect) and not call.protected:
            assert not any(bodies[id]["replicas"] for id in call.instances)


def test_the_policy_sees_good_hosts_and_the_rest() -> None:
    two = group(instance("i-1"), instance("i-2"), desired=3, gpu="L40S", gpus=2, price=1.5, boot_timeout_s=60)
    known = FleetMemory(
        {"p": PoolMemory(2, 5, "no", NOW + 7, boots=(80.0, 100.0, 90.0))}, memory("i-1", "i-2").machines
    )
    fleet = fleet_of([two], known, {"i-1": BUSY, "i-2": {**BUSY, "notice": LEAVES}}, 50.0, NOW)
    (pool,) = fleet.pools
    assert (pool.asked, pool.devices, pool.gpu, pool.price_per_h) == (2, ("cuda:0", "cuda:1"), "L40S", 1.5)
    assert (pool.retry_at, pool.error, pool.boot_s, pool.max_hosts) == (57.0, "no", 90.0, 8)
    assert fleet.machines == (Machine("i-1", "p", "ready", -50.0), Machine("i-2", "p", "interrupted", -50.0))
    (row,) = fleet.report
    assert row["states"] == {"ready": 1, "interrupted": 1} and row["desired"] == 3 and row["failures"] == 5


def test_a_pool_without_gpus_offers_its_cpu() -> None:
    (pool,) = fleet_of([group()], FleetMemory(), {}, 0.0, NOW).pools
    assert pool.devices == ("cpu",)
