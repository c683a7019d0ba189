import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.runtime.controller.policy import MAX_BACKOFF_S, count_failure, decide
from stoker.runtime.controller.policy_replicas import Situation, wanted_replicas
from stoker.runtime.controller.policy_state import Decision, Demand, Failures, Outlook, Placed, Rules, Timing, View
from stoker.runtime.spec import FunctionSpec, Scaling

HOSTS = {"h0": ["cpu"], "h1": ["cuda:0", "cuda:1"]}


def spec(name: str = "f", version: str = "v1", **scaling: float) -> FunctionSpec:
    return FunctionSpec(name=name, kind="python", version=version, scaling=Scaling(**scaling))  # type: ignore[arg-type]


def replica(id: str, state: str = "ready", version: str = "v1", host: str = "h0", device: str = "cpu") -> Placed:
    return Placed(id, "f", version, host, device, state)


def choose(
    demand: Demand, placed: tuple[Placed, ...] = (), function: FunctionSpec | None = None, **more: object
) -> Decision:
    function = function or spec()
    view = View(now=100.0, specs={"f": function}, demands={"f": demand}, hosts=HOSTS, placed=placed)
    return decide(View(**{**{name: getattr(view, name) for name in View.__slots__}, **more}))


demands = st.builds(
    Demand,
    st.integers(0, 500),
    st.integers(0, 100),
    st.integers(0, 5),
    st.one_of(st.just(math.inf), st.floats(0, 1000)),
)
bounds = st.tuples(st.integers(0, 4), st.integers(1, 8)).map(lambda b: spec(min_replicas=min(b), max_replicas=max(b)))


def count(function: FunctionSpec, demand: Demand, current: int, starting: int) -> int:
    at = Situation(100.0, function, demand, Outlook(), Rules(), Timing())
    return wanted_replicas(at, current, starting).wanted


@given(bounds, demands, st.integers(0, 8), st.integers(0, 8))
def test_never_below_min_nor_above_max(function: FunctionSpec, demand: Demand, current: int, starting: int) -> None:
    wanted = count(function, demand, current, min(starting, current))
    assert function.scaling.min_replicas <= wanted <= function.scaling.max_replicas


@given(bounds, demands.filter(lambda d: d.work > 0), st.integers(0, 8))
def test_work_always_wakes_and_never_takes_a_replica_away(function: FunctionSpec, demand: Demand, current: int) -> None:
    wanted = count(function, demand, current, 0)
    assert wanted >= 1
    assert wanted >= min(current, function.scaling.max_replicas)


@given(st.integers(1, 500), st.sampled_from(["unseen", "starting", "loading"]))
def test_a_burst_to_a_sleeping_function_with_one_allowed_replica_starts_exactly_one(burst: int, state: str) -> None:
    assert len(choose(Demand(queued=burst, idle_s=0)).add) == 1
    again = choose(Demand(queued=burst, idle_s=0), (replica("a", state),))
    assert again.add == () and [kept.id for kept in again.keep] == ["a"]


def test_idle_replicas_go_only_after_the_timeout() -> None:
    function = spec(idle_timeout_s=10)
    assert choose(Demand(idle_s=9), (replica("a"),), function).keep
    assert not choose(Demand(idle_s=10), (replica("a"),), function).keep


def test_a_starting_replica_is_not_taken_away_while_idle() -> None:
    assert choose(Demand(idle_s=1000), (replica("a", "loading"),)).keep


def test_a_queue_over_the_target_adds_replicas_up_to_the_maximum() -> None:
    function = spec(max_replicas=3, target_queue=10)
    assert len(choose(Demand(queued=15, idle_s=0), (), function).add) == 2
    assert len(choose(Demand(queued=500, idle_s=0), (), function).add) == 3


def test_without_a_target_a_replica_is_added_for_what_one_can_run_at_once() -> None:
    assert len(choose(Demand(queued=3, idle_s=0), (), spec(max_replicas=8)).add) == 3


def test_a_version_without_a_place_says_so_though_its_jobs_are_with_the_one_before() -> None:
    """That one keeps those that it can't take: nothing is queued."""
    old, newest = replica("old", version="v1"), replace(spec(version="v2"), gpu="A100")
    decision = choose(Demand(running=1, idle_s=0), (old,), newest, hosts={"h0": ["cpu"]})
    assert decision.keep == (old,) and decision.add == ()
    assert decision.reasons["f"].code == "no_fitting_pool" and "A100" in decision.reasons["f"].message
    placed = choose(Demand(running=1, idle_s=0), (old,), spec(version="v2"))
    assert placed.add and placed.reasons == {}


def test_a_function_that_needs_a_gpu_waits_for_one() -> None:
    function = FunctionSpec(name="f", kind="python", version="v1", gpu="any")
    assert choose(Demand(queued=1, idle_s=0), (), function, hosts={"h0": ["cpu"]}).add == ()
    assert choose(Demand(queued=1, idle_s=0), (), function).add == (("f", "h1", "cuda:0"),)


def test_the_last_error_of_a_failing_function_is_remembered() -> None:
    failed = replace(replica("a", "failed"), error={"message": "no such module"})
    assert choose(Demand(queued=1, idle_s=0), (failed,)).failures["f"].error == {"message": "no such module"}


def test_new_replicas_spread_over_devices() -> None:
    added = choose(Demand(queued=500, idle_s=0), (), spec(max_replicas=3)).add
    assert {(host, device) for _, host, device in added} == {("h0", "cpu"), ("h1", "cuda:0"), ("h1", "cuda:1")}


def test_replicas_of_a_dead_host_are_replaced() -> None:
    decision = choose(Demand(running=1, idle_s=0), (replica("a", host="dead"),))
    assert decision.keep == () and len(decision.add) == 1


def test_without_hosts_nothing_is_placed() -> None:
    assert choose(Demand(queued=1), hosts={}).add == ()


def test_an_old_version_serves_until_the_new_one_is_ready() -> None:
    old, function = replica("a", version="v0"), spec()
    first = choose(Demand(queued=1, idle_s=0), (old,), function)
    assert [kept.id for kept in first.keep] == ["a"] and len(first.add) == 1
    loading = choose(Demand(queued=1, idle_s=0), (old, replica("b", "loading")), function)
    assert {kept.id for kept in loading.keep} == {"a", "b"}
    ready = choose(Demand(queued=1, idle_s=0), (old, replica("b")), function)
    assert ready.drain == ("a",), "it may just have claimed a job"
    drained = replace(old, state="draining", draining=True)
    assert {r.id for r in choose(Demand(running=1), (replace(drained, inflight=1), replica("b")), function).keep} == {
        "a",
        "b",
    }
    assert [kept.id for kept in choose(Demand(running=1), (drained, replica("b")), function).keep] == ["b"]


def test_a_new_version_of_an_awake_function_is_started_even_without_work() -> None:
    decision = choose(Demand(idle_s=1), (replica("a", version="v0"),))
    assert [kept.id for kept in decision.keep] == ["a"] and len(decision.add) == 1
    asleep = choose(Demand(idle_s=1000), (replica("a", version="v0"),))
    assert (asleep.keep, asleep.add) == ((), ())


def test_an_old_version_serves_on_while_the_new_one_fails_to_start() -> None:
    placed = (replica("a", version="v0"), replica("b", "failed"))
    failures = {"f": Failures("v1", 5, 1000.0)}
    assert [kept.id for kept in choose(Demand(queued=1, idle_s=0), placed, failures=failures).keep] == ["a"]


def test_an_old_version_of_a_function_that_was_deleted_in_between_is_not_served() -> None:
    old = replace(replica("a", version="v0"), born="first")
    again = replace(spec(), born="second")
    assert choose(Demand(queued=1, idle_s=0), (old,), again).keep == ()


def test_functions_that_are_deleted_lose_their_replicas() -> None:
    assert choose(Demand(), (replica("a"),), specs={}).keep == ()


def test_a_failed_start_is_retried_at_once_then_backs_off() -> None:
    failed = (replica("a", "failed"),)
    first = choose(Demand(queued=1, idle_s=0), failed)
    assert first.keep == () and len(first.add) == 1
    second = choose(Demand(queued=1, idle_s=0), failed, failures=first.failures)
    assert second.add == ()
    later = choose(Demand(queued=1, idle_s=0), (), failures=second.failures, now=101.0)
    assert len(later.add) == 1


def test_a_crash_of_a_replica_that_was_ready_is_no_failed_start() -> None:
    """Though nobody saw it ready: it may have come and gone between two looks."""
    crashed = replace(replica("a", "failed"), was_ready=True)
    failures = {"f": Failures("v1", 2, 100.5)}
    decision = choose(Demand(queued=1, idle_s=0), (crashed,), failures=failures)
    assert decision.failures["f"].count == 0 and len(decision.add) == 1
    unsettled = replace(crashed, settled=False)
    assert choose(Demand(queued=1, idle_s=0), (unsettled,), failures=failures).failures["f"].count == 3


def test_crashes_soon_behind_each_other_are_followed_by_pauses_but_short_ones() -> None:
    crashed = replace(replica("a", "failed"), was_ready=True)
    failures: dict[str, Failures] = {}
    now, pauses = 100.0, []
    for _ in range(6):
        decision = choose(Demand(queued=1, idle_s=0), (crashed,), failures=failures, now=now)
        failures = dict(decision.failures)
        pauses.append(failures["f"].retry_at - now)
        assert len(decision.add) == (pauses[-1] == 0)
        now = failures["f"].retry_at + 0.1
        ready = choose(Demand(queued=1, idle_s=0), (replica("b"),), failures=failures, now=now)
        failures = dict(ready.failures)
    assert pauses == pytest.approx([0, 0.5, 1, 2, 2, 2])
    later = choose(Demand(queued=1, idle_s=0), (crashed,), failures=failures, now=now + 11)
    assert later.failures["f"].retry_at == now + 11


def test_a_new_version_forgets_the_failures_of_the_old_one() -> None:
    failures = {"f": Failures("v0", 9, 1e9)}
    assert len(choose(Demand(queued=1, idle_s=0), failures=failures).add) == 1


def test_backoff_is_bounded() -> None:
    memory = Failures("v1")
    for _ in range(50):
        memory = count_failure(memory, now=0.0)
    assert memory.retry_at == MAX_BACKOFF_S
