"""A newest version that fails to start, and the proven one that serves meanwhile."""

from dataclasses import replace

import pytest

from stoker.queue.cluster import Cluster
from stoker.runtime.controller.controller import failing_functions, merge
from stoker.runtime.controller.leader import Leadership
from stoker.runtime.controller.policy import decide
from stoker.runtime.controller.policy_rollout import (
    ASKED_S,
    Rollout,
    remember_proven,
    rollouts,
    told,
    with_starts_asked,
)
from stoker.runtime.controller.policy_state import Decision, Demand, Failures, Machine, Placed, Pool, View
from stoker.runtime.routing.router import Route, Router
from stoker.runtime.spec import FunctionSpec, Scaling, readable

NOW = 100.0
WORK, IDLE = Demand(queued=1, idle_s=0), Demand(idle_s=1000)
ERROR = {"type": "cold_start_error", "message": "no such module"}


def spec(version: str, born: str = "b", **more: object) -> FunctionSpec:
    return FunctionSpec(name="f", kind="python", version=version, born=born, **more)  # type: ignore[arg-type]


def replica(id: str, version: str, state: str = "ready", host: str = "h0", **more: object) -> Placed:
    error = ERROR if state == "failed" else None
    return replace(Placed(id, "f", version, host, "cpu", state, error, "b"), **more)  # type: ignore[arg-type]


def view(demand: Demand, *placed: Placed, failed: Failures | None = None, **more: object) -> View:
    """v2 is deployed, v1 was ready."""
    known = {"f": failed or Failures("v2", 1, NOW + 5, ERROR)}
    whole = View(NOW, {"f": spec("v2")}, {"f": demand}, {"h0": ["cpu"]}, placed, known, proven={"f": spec("v1")})
    return replace(whole, **more)  # type: ignore[arg-type]


def served(decision: Decision) -> dict[str, str]:
    return {name: proven.version for name, proven in decision.served.items()}


def test_work_wakes_the_proven_version_while_the_new_one_waits_for_its_next_try() -> None:
    decision = decide(view(WORK))
    assert served(decision) == {"f": "v1"}
    assert (decision.add, decision.trials) == ((("f", "h0", "cpu"),), ())


def test_the_new_version_is_tried_beside_it_when_its_pause_is_over() -> None:
    decision = decide(view(WORK, failed=Failures("v2", 3, NOW)))
    assert decision.add == decision.trials == (("f", "h0", "cpu"),)
    loading = replica("new", "v2", "loading")
    again = decide(view(WORK, replica("old", "v1"), loading, failed=Failures("v2", 3, NOW)))
    assert again.add == again.trials == (), "one try at a time"
    assert {r.id for r in again.keep} == {"old", "new"}


def test_a_first_failure_brings_the_proven_version_at_once() -> None:
    decision = decide(view(WORK, replica("a", "v2", "failed"), failed=Failures("v2")))
    assert decision.failures["f"] == Failures("v2", 1, NOW, ERROR)
    assert served(decision) == {"f": "v1"} and len(decision.add) == len(decision.trials) == 1


def test_nothing_is_tried_while_the_function_sleeps() -> None:
    decision = decide(view(IDLE, failed=Failures("v2", 3, NOW)))
    assert (decision.add, decision.trials, decision.keep) == ((), (), ())


def test_the_proven_version_scales_by_its_own_bounds() -> None:
    proven = {"f": spec("v1", scaling=Scaling(max_replicas=3))}
    assert len(decide(view(Demand(queued=50, idle_s=0), replica("a", "v1"), proven=proven)).add) == 2


def test_a_new_version_that_is_ready_takes_over() -> None:
    ready = view(WORK, replica("old", "v1"), replica("new", "v2"))
    proven = remember_proven(ready)
    assert proven == {"f": spec("v2")}
    decision = decide(replace(ready, proven=proven))
    assert (decision.served, decision.drain) == ({}, ("old",))


def test_a_model_whose_weights_still_arrive_proves_nothing() -> None:
    arriving = view(WORK, replica("old", "v1"), replica("new", "v2", settled=False), failed=Failures("v2", 2, NOW - 1))
    assert remember_proven(arriving) == {"f": spec("v1")}
    decision = decide(arriving)
    assert {r.id for r in decision.keep} == {"old", "new"} and decision.drain == decision.trials == ()
    assert decision.failures["f"].count == 2


@pytest.mark.parametrize(
    "failed", [Failures("v2"), Failures("v1", 3, NOW + 5)], ids=["not tried yet", "failures of another version"]
)
def test_a_new_deployment_is_tried_before_anything_else(failed: Failures) -> None:
    decision = decide(view(WORK, failed=failed))
    assert (served(decision), len(decision.add), decision.trials) == ({}, 1, ())


def test_a_version_that_was_ready_once_waits_for_itself() -> None:
    decision = decide(view(WORK, proven={"f": spec("v2")}))
    assert (served(decision), decision.add) == ({}, ())


def test_proven_versions_go_with_their_function() -> None:
    assert remember_proven(view(WORK, specs={})) == {}
    assert remember_proven(view(WORK, specs={"f": spec("v2", born="again")})) == {}


def test_failed_starts_of_the_proven_version_have_pauses_of_their_own() -> None:
    both = view(WORK, replica("old", "v1", "failed"), proven_failures={"f": Failures("v1", 2, NOW)})
    decision = decide(both)
    assert decision.proven_failures["f"] == Failures("v1", 3, NOW + 1.0, ERROR)
    assert (decision.add, decision.failures["f"]) == ((), Failures("v2", 1, NOW + 5, ERROR))
    told = failing_functions(decision, NOW, 1000.0)["f"]
    assert (told["version"], told["count"], told["retry_at"]) == ("v2", 3, 1001.0), "nothing serves just now"


def test_callers_are_not_refused_while_the_proven_version_serves() -> None:
    many = Failures("v2", 9, NOW + 30, ERROR)
    assert failing_functions(decide(view(WORK, failed=many)), NOW, 1000.0) == {}
    assert failing_functions(decide(view(WORK, failed=many, proven={})), NOW, 1000.0)["f"]["count"] == 9


def test_a_start_knows_whether_another_version_can_serve_its_jobs() -> None:
    def started(seen: View) -> dict[str, tuple[int, bool]]:
        records = merge(decide(seen), {}, seen)["h0"].values()
        return {record["spec"]["version"]: (record["failed_before"], record["relieves"]) for record in records}

    assert started(view(WORK, failed=Failures("v2"))) == {"v2": (0, True)}
    assert started(view(WORK, failed=Failures("v2", 4, NOW))) == {"v1": (0, False), "v2": (4, True)}
    assert started(view(WORK, failed=Failures("v2"), proven={})) == {"v2": (0, False)}


def test_a_trial_gets_a_host_of_its_own_version_without_more_of_the_proven_one() -> None:
    pools = (Pool("cpus", 0.1, devices=("cpu",), asked=1), Pool("gpus", 1.0, gpu="L4"))
    full = view(WORK, replica("old", "v1"), failed=Failures("v2", 1, NOW), specs={"f": spec("v2", gpu="L4")})
    machines = (Machine("h0", "cpus", "ready"),)
    decision = decide(replace(full, pools=pools, machines=machines))
    assert (decision.hosts, decision.add, decision.trials) == ({"cpus": 1, "gpus": 1}, (), ())
    assert decision.memory.outlooks["f"].awaited == 0


@pytest.mark.parametrize(
    ("placed", "proven", "serving"),
    [((), {"f": spec("v1")}, "v1"), ((replica("old", "v0"),), {}, "v0"), ((), {}, "")],
    ids=["proven", "still awake", "none"],
)
def test_what_is_told(placed: tuple[Placed, ...], proven: dict[str, FunctionSpec], serving: str) -> None:
    seen = view(WORK, *placed, proven=proven)
    decision = decide(seen)
    told_now = rollouts(seen, decision.failures, decision.served)
    assert told_now == {"f": Rollout("v2", serving, "no such module")}
    said = f"version {serving} serves" if serving else "no other version serves"
    assert told("f", told_now["f"]) == f"f: version v2 does not start: no such module; {said}"
    again = replace(seen, proven={"f": spec("v2")})
    assert rollouts(again, decision.failures, {}) == {}, "it has been ready: no rollout"


async def test_proven_versions_outlive_their_controller(cluster: Cluster) -> None:
    leader = Leadership(cluster, "a")
    assert await leader.acquire()
    assert await cluster.proven() == {}
    known = spec("v1", scaling=Scaling(max_replicas=3))
    assert await cluster.write_proven(leader.candidate, {"f": known.to_dict()})
    assert not await cluster.write_proven("another", {})
    assert readable(await cluster.proven()) == {"f": known}


def test_an_older_version_serves_on_until_nothing_of_the_new_start_can_fail() -> None:
    placed = (replica("old", "v1"), replica("new", "v2", settled=False))
    decision = decide(view(WORK, *placed, failed=Failures("v2"), proven={}))
    assert {r.id for r in decision.keep} == {"old", "new"} and decision.drain == ()


def asked(ago_s: float, *placed: Placed, failed: Failures | None = None, proven: str = "v1") -> Demand:
    """The demand for v2, whose start was asked for `ago_s` ago."""
    seen = view(IDLE, *placed, failed=failed or Failures("v2"), proven={"f": spec(proven)})
    return with_starts_asked(seen, {"f": ago_s, "deleted": 0.0}).demands["f"]


def test_a_start_that_is_asked_for_is_tried_though_nothing_waits() -> None:
    seen = with_starts_asked(view(IDLE, failed=Failures("v2")), {"f": 1.0})
    assert decide(seen).add == (("f", "h0", "cpu"),)
    assert asked(1) == asked(1, replica("a", "v2", "loading")) == Demand(queued=1, idle_s=1)
    assert asked(ASKED_S) == Demand(idle_s=ASKED_S), "nobody wants to know any more"


def test_what_started_for_a_trial_stays_as_long_as_an_idle_replica() -> None:
    ready = replica("a", "v2")
    assert asked(5, ready, proven="v2") == Demand(idle_s=5)
    kept = with_starts_asked(view(IDLE, ready, failed=Failures("v2"), proven={"f": spec("v2")}), {"f": 5.0})
    assert [each.id for each in decide(kept).keep] == ["a"] and decide(kept).add == ()
    later = replace(kept, demands={"f": Demand(idle_s=spec("v2").scaling.idle_timeout_s)})
    assert decide(later).keep == ()


def test_a_trial_start_that_failed_is_not_repeated_until_it_is_asked_for_again() -> None:
    assert asked(5, replica("a", "v2", "failed")).queued == 0
    once = Failures("v2", 1, NOW - 3, ERROR)
    assert asked(5, failed=once).queued == 0
    assert asked(2, failed=once).queued == 1, "what made it fail may be mended"
    assert asked(0, failed=Failures("v2", 4, NOW + 9, ERROR)).queued == 0, "not before its pause is over"
    again = with_starts_asked(view(IDLE, failed=once), {"f": 2.0})
    assert rollouts(again, again.failures, {}) == {} and decide(again).add == (("f", "h0", "cpu"),)


def test_a_router_has_nothing_to_start() -> None:
    router = FunctionSpec(name="f", kind="router", version="v2", router=Router((Route("small", tools=True),), "small"))
    seen = replace(view(IDLE), specs={"f": router}, failures={})
    assert with_starts_asked(seen, {"f": 0.0}).demands == {"f": IDLE}
