"""`decide` has an answer, and soon, for any spec that a deployment accepts and whatever queues and clocks say: one
function that it raises for, or is long about, would keep all others from waking."""

import math
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.runtime.controller.policy import decide
from stoker.runtime.controller.policy_forecast import staffing, waiting_longer
from stoker.runtime.controller.policy_state import (
    Demand,
    Failures,
    Machine,
    Memory,
    Outlook,
    Placed,
    Pool,
    Rules,
    Timing,
    View,
)
from stoker.runtime.spec import SLO, Batch, FunctionSpec, ModelOptions, Scaling

HUGE, TINY = 1e100, 1e-300

times = st.sampled_from([0.0, TINY, 1e-9, 0.25, 1.0, 3600.0, 1e9, 1e18, HUGE])
rates = st.sampled_from([0.0, TINY, 1e-4, 0.3, 40.0, 1e6, 1e18, HUGE])
many = st.sampled_from([0, 1, 2, 40, 10**6, 10**9, 2**53])
few = st.integers(0, 3)

specs = st.builds(
    FunctionSpec,
    st.just("f"),
    st.sampled_from(["python", "llm"]),
    version=st.sampled_from(["v1", "v2"]),
    weights=st.just("file:///x"),
    gpu=st.sampled_from(["", "L4"]),
    batch=st.sampled_from([None, Batch(1, 0), Batch(4096, 600_000)]),
    concurrency=st.sampled_from([1, 3, 1024]),
    slo=st.sampled_from([None, 1, 250.0, 1e12]).map(SLO),
    scaling=st.builds(
        Scaling,
        st.sampled_from([0, 1, 3]),
        st.sampled_from([3, 50]),
        st.sampled_from([0, TINY, 60, 1e9]),
        st.sampled_from([0, 1, 10**9]),
        st.sampled_from([0, 2, 10_000]),
    ),
    model=st.sampled_from([1, 64, 4096]).map(lambda most: ModelOptions(max_seqs=most)),
)
demands = st.builds(Demand, many, many, many, times | st.just(math.inf), times, rates, rates)
replicas = st.builds(
    Placed,
    st.sampled_from(["a", "b", "c"]),
    st.just("f"),
    st.sampled_from(["v1", "v2"]),
    st.sampled_from(["m0", "own", "dead"]),
    st.just("cuda:0"),
    st.sampled_from(["unseen", "loading", "ready", "draining", "failed", "gone"]),
    inflight=many,
    draining=st.booleans(),
)
outlooks = st.builds(
    Outlook,
    at=times | st.just(-math.inf),
    fast=rates,
    steady=rates,
    slow=rates,
    woke=times | st.just(-math.inf),
    surged=times | st.just(math.inf),
    peak=rates,
    drain_woke=times,
    busy_s=times,
    done=rates,
    service_s=times,
    full_s=times,
    crowded_s=times,
    seats=many,
    told=rates,
    came=times | st.just(-math.inf),
    idle=st.booleans(),
    gaps=st.lists(times, max_size=20).map(tuple),
    crests=st.lists(many, max_size=3).map(tuple),
    crest=many,
    highs=st.lists(st.tuples(times, many), max_size=3).map(tuple),
    loads=st.lists(times, max_size=3).map(tuple),
    awaited=few,
    credit_usd=times | st.just(-1e9),
)


@st.composite
def views(draw: st.DrawFn) -> View:
    pool = Pool(
        "p",
        draw(st.sampled_from([0.0, TINY, 2.0, 1e9])),
        gpu="L4",
        max_hosts=3,
        boot_s=draw(times),
        asked=draw(few),
        retry_at=draw(times),
    )
    spec = draw(specs)
    unique = {each.id: each for each in draw(st.lists(replicas, max_size=4))}
    return View(
        draw(times),
        {"f": spec},
        {"f": draw(demands)},
        {"m0": ["cuda:0"], "own": ["cpu", "cuda:0"]},
        tuple(unique.values()),
        {"f": Failures("v1", draw(many), draw(times), None, draw(many), draw(times))},
        {"f": Timing(draw(times), draw(times))} if draw(st.booleans()) else {},
        (pool,),
        (Machine("m0", "p", "ready", draw(times)), Machine("m1", "p", "pending", draw(times))),
        Memory({"f": draw(outlooks)}, {"a": draw(times)}, {"m0": draw(times)}, {"m1": draw(times)}, {"p": (1.0, 1e9)}),
        Rules(prewarm_usd_per_h=draw(st.sampled_from([0.0, 0.5, 1e9])), host_idle_s=draw(times)),
        {"f": replace(spec, version="v0")} if draw(st.booleans()) else {},
    )


@settings(max_examples=300, deadline=None)
@given(views(), st.lists(st.tuples(times, demands), max_size=3))
def test_a_decision_never_raises_and_keeps_to_the_bounds(view: View, later: list[tuple[float, Demand]]) -> None:
    for passed, demand in [(0.0, view.demands["f"]), *later]:
        view = replace(view, now=view.now + passed, demands={"f": demand})
        decision, scaling = decide(view), view.specs["f"].scaling
        assert len(decision.add) <= scaling.max_replicas
        view = replace(view, memory=decision.memory, failures=decision.failures)


@pytest.mark.parametrize("room", [1024 * 4096, 10**9])
def test_a_replica_with_room_for_millions_takes_no_time_to_plan(room: int) -> None:
    began = time.perf_counter()
    assert staffing(0.5, room, 1.0, 0.002, math.inf) == 1
    assert time.perf_counter() - began < 0.05


@pytest.mark.parametrize(
    ("load", "servers", "share"),
    # Erlang's C formula in closed form: one server is busy for `load` of the time; of two, load² / (2 + load) wait.
    [(0.5, 1, 0.5), (0.9, 1, 0.9), (0.5, 2, 0.1), (1.0, 2, 1 / 3), (3.0, 3, 1.0), (1.0, 1000, 0.0)],
)
def test_the_share_that_waits_is_erlangs(load: float, servers: int, share: float) -> None:
    assert waiting_longer(load, servers, 0.0) == pytest.approx(share, abs=1e-12)
