"""What must hold for any state of the cluster, whatever the policy thinks best."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.runtime.controller.policy import decide
from stoker.runtime.controller.policy_state import Decision, Demand, Machine, Memory, Outlook, Placed, Pool, Rules, View
from stoker.runtime.spec import FunctionSpec, Scaling

NAMES = ("f", "g")
STATES = ("unseen", "loading", "ready", "ready", "draining", "failed", "gone")
NOW = 10_000.0

few = settings(max_examples=40, deadline=None)

counts = st.integers(0, 40)
rates = st.floats(0, 50)
demands = st.builds(
    Demand, counts, counts, st.integers(0, 3), st.one_of(st.just(math.inf), st.floats(0, 2000)), rates, rates, rates
)
outlooks = st.builds(
    Outlook,
    at=st.just(NOW - 1),
    fast=rates,
    steady=rates,
    slow=rates,
    busy_s=st.floats(0, 500),
    done=st.floats(0, 100),
    service_s=st.sampled_from([0.0, 0.05, 4.0, 30.0]),
    full_s=st.sampled_from([0.0, 5.0]),
    came=st.floats(NOW - 3000, NOW),
    idle=st.booleans(),
    gaps=st.lists(st.floats(1, 3000), max_size=20).map(tuple),
    crests=st.lists(st.integers(0, 9), max_size=5).map(tuple),
    highs=st.lists(st.tuples(st.floats(NOW - 50, NOW + 300), st.integers(0, 9)), max_size=4).map(tuple),
    awaited=st.integers(0, 2),
    credit_usd=st.floats(-1, 5),
)


@st.composite
def views(draw: st.DrawFn) -> View:
    specs = {}
    for name in NAMES[: draw(st.integers(1, 2))]:
        low, high = sorted((draw(st.integers(0, 3)), draw(st.integers(1, 6))))
        scaling = Scaling(low, max(1, high), draw(st.sampled_from([0.0, 60.0, 1000.0])), 0, draw(st.integers(0, 2)))
        gpu = draw(st.sampled_from(["", "any", "L4"]))
        specs[name] = FunctionSpec(name, "python", version="v1", gpu=gpu, scaling=scaling)
    pools = (
        Pool("cheap", 1.0, spot=True, gpu="L4", max_hosts=3, retry_at=draw(st.sampled_from([0.0, NOW + 30]))),
        Pool("dear", 4.0, gpu="L4", devices=("cuda:0", "cuda:1"), min_hosts=draw(st.integers(0, 1)), max_hosts=4),
    )
    machine_states = st.sampled_from(["pending", "ready", "ready", "interrupted", "retiring"])
    machines = tuple(
        Machine(f"m{i}", draw(st.sampled_from(["cheap", "dear"])), draw(machine_states), NOW - 100)
        for i in range(draw(st.integers(0, 5)))
    )
    devices = {pool.name: list(pool.devices) for pool in pools}
    hosts = {m.id: devices[m.pool] for m in machines if m.state != "pending"} | {"own": ["cpu", "cuda:0"]}
    placed = []
    for i in range(draw(st.integers(0, 8))):
        host = draw(st.sampled_from([*hosts, "dead"]))
        state = draw(st.sampled_from(STATES))
        inflight = draw(st.integers(0, 3)) if state in ("ready", "draining") else 0
        version, name = draw(st.sampled_from(["v1", "v0"])), draw(st.sampled_from(NAMES))
        device = hosts.get(host, ["cpu"])[0]
        draining = draw(st.booleans()) if state in ("ready", "draining", "gone") else False
        placed.append(Placed(f"{name}-{i}", name, version, host, device, state, None, "", inflight, draining))
    pools = tuple(replace(pool, asked=draw(st.integers(0, pool.max_hosts))) for pool in pools)
    known = {name: draw(outlooks) for name in specs if draw(st.booleans())}
    empty = {m.id: draw(st.floats(NOW - 100, NOW)) for m in machines}
    return View(
        NOW,
        specs,
        {name: draw(demands) for name in specs},
        hosts,
        tuple(placed),
        pools=pools,
        machines=machines,
        memory=Memory(known, empty=empty),
        rules=Rules(prewarm_usd_per_h=draw(st.sampled_from([0.0, 5.0]))),
    )


def serving(view: View, decision: Decision, name: str) -> list[Placed]:
    """Kept replicas of the current version that go on taking work."""
    version = view.specs[name].version
    kept = (r for r in decision.keep if r.function == name and r.version == version)
    return [r for r in kept if r.id not in decision.drain]


@few
@given(views())
def test_never_above_max(view: View) -> None:
    decision = decide(view)
    for name, spec in view.specs.items():
        added = sum(function == name for function, _, _ in decision.add)
        assert len(serving(view, decision, name)) + added <= spec.scaling.max_replicas


@few
@given(views())
def test_never_below_min_where_there_is_room(view: View) -> None:
    roomy = replace(view, hosts={**view.hosts, "big": ["cuda:0", "cpu"]})
    decision = decide(roomy)
    for name, spec in view.specs.items():
        added = sum(function == name for function, _, _ in decision.add)
        if name not in decision.failures:
            assert len(serving(roomy, decision, name)) + added >= spec.scaling.min_replicas


@few
@given(views())
def test_a_busy_replica_is_never_taken_away(view: View) -> None:
    kept = {replica.id for replica in decide(view).keep}
    for replica in view.placed:
        if replica.inflight and replica.function in view.specs and replica.host in view.hosts:
            assert replica.id in kept


@few
@given(views())
def test_a_replica_that_serves_is_drained_before_it_goes_while_there_is_work(view: View) -> None:
    kept = {replica.id for replica in decide(view).keep}
    for r in view.placed:
        if r.state == "ready" and r.function in view.specs and r.host in view.hosts and view.demands[r.function].work:
            assert r.id in kept


@few
@given(views())
def test_nothing_goes_while_something_starts_or_waits(view: View) -> None:
    decision = decide(view)
    good = {machine.id for machine in view.machines if machine.good} | {"own"}
    for name, spec in view.specs.items():
        mine = [r for r in view.placed if r.function == name and r.version == "v1" and r.host in good]
        mine = [r for r in mine if not r.draining and r.state not in ("draining", "failed", "gone")]
        if any(r.starting for r in mine) or view.demands[name].queued:
            assert len(serving(view, decision, name)) >= min(len(mine), spec.scaling.max_replicas)


@few
@given(views())
def test_the_first_request_always_wakes(view: View) -> None:
    roomy = replace(view, hosts={**view.hosts, "big": ["cuda:0", "cpu"]})
    decision = decide(roomy)
    for name in view.specs:
        if view.demands[name].queued and name not in decision.failures:
            added = any(function == name for function, _, _ in decision.add)
            assert added or serving(roomy, decision, name)


@few
@given(views())
def test_hosts_stay_within_their_pools_bounds_and_only_empty_ones_go(view: View) -> None:
    decision = decide(view)
    used = {replica.host for replica in decision.keep} | {host for _, host, _ in decision.add}
    assert not used & set(decision.retire)
    for pool in view.pools:
        good = sum(machine.pool == pool.name and machine.good for machine in view.machines)
        assert decision.hosts[pool.name] <= max(pool.max_hosts, good, pool.asked)
        if pool.retry_at <= view.now:
            assert decision.hosts[pool.name] >= pool.min_hosts


@few
@given(views())
def test_no_new_replica_lands_on_a_host_that_goes_or_beyond_its_seats(view: View) -> None:
    decision = decide(view)
    bad = {machine.id for machine in view.machines if not machine.good}
    assert not bad & {host for _, host, _ in decision.add}
    pooled = {machine.id for machine in view.machines}
    for _, host, device in decision.add:
        there = sum(r.host == host and r.device == device for r in decision.keep)
        there += sum((h, d) == (host, device) for _, h, d in decision.add)
        assert host not in pooled or there == 1


@few
@given(views())
def test_deciding_is_deterministic_and_queued_jobs_have_a_reason(view: View) -> None:
    decision = decide(view)
    assert decide(view) == decision
    assert set(decision.reasons) == {name for name in view.specs if view.demands[name].queued}
    assert all(reason.code and reason.message for reason in decision.reasons.values())


def steady_view(memory: Memory, now: float, placed: tuple[Placed, ...], rate: float, running: int) -> View:
    spec = FunctionSpec("f", "python", version="v1", scaling=Scaling(0, 40, 300.0))
    demand = Demand(0, running, 0, 0.0, 0.0, rate, rate)
    return View(now, {"f": spec}, {"f": demand}, {"h": ["cpu"]}, placed, memory=memory)


@pytest.mark.parametrize("rate", [0.5, 2.0])
def test_twenty_percent_of_noise_does_not_make_it_flap(rate: float) -> None:
    chance, memory, replicas, history = random.Random(7), Memory(), 0, []
    for tick in range(700):
        noisy = rate * chance.uniform(0.8, 1.2)
        running = min(replicas, round(noisy * 4.0))
        shares = [index < running for index in range(replicas)]
        placed = tuple(Placed(f"f-{i}", "f", "v1", "h", "cpu", "ready", inflight=int(b)) for i, b in enumerate(shares))
        decision = decide(steady_view(memory, float(tick), placed, noisy, max(1, running)))
        memory = decision.memory
        replicas = len(decision.keep) - len(decision.drain) + len(decision.add)
        history.append(replicas)
    late = history[-400:]
    changes = sum(before != after for before, after in zip(late, late[1:], strict=False))
    assert late[-1] >= rate * 4 and changes <= 1, late[::10]
