"""A function whose decision raises must not keep others from being decided, nor lose what it has."""

import logging
from dataclasses import replace
from typing import Any

import pytest

from stoker.queue.broker import Broker
from stoker.queue.cluster import Cluster
from stoker.queue.records import NewJob, new_job_id
from stoker.runtime.controller.controller import Controller
from stoker.runtime.controller.isolation import Isolation
from stoker.runtime.controller.leader import Leadership
from stoker.runtime.controller.policy import decide
from stoker.runtime.controller.policy_state import Demand, Failures, Machine, Memory, Outlook, Placed, Pool, Rules, View
from stoker.runtime.controller.provider import LocalProvider
from stoker.runtime.spec import FunctionSpec, Scaling

BROKEN = Outlook(at=1.0, loads=("three seconds",))  # type: ignore[arg-type]
SPECS = {name: FunctionSpec(name, "python", version="v1") for name in ("bad", "good")}
WAITS = {name: Demand(queued=1, idle_s=0) for name in SPECS}


def view(**more: Any) -> View:
    usual = {"now": 2.0, "specs": SPECS, "demands": WAITS, "hosts": {"h": ["cpu"]}, "memory": Memory({"bad": BROKEN})}
    return View(**{**usual, **more})


def added(isolation: Isolation, seen: View) -> list[str]:
    return [function for function, _, _ in isolation.decide(seen).add]


def test_the_others_are_decided_and_its_trouble_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TypeError):
        decide(view())
    isolation = Isolation()
    with caplog.at_level(logging.INFO, "stoker.controller"):
        decisions = [isolation.decide(view()) for _ in range(20)]
    assert {decision.add for decision in decisions} == {(("good", "h", "cpu"),)}
    assert decisions[-1].reasons["bad"].code == "not_scaled" and "TypeError" in decisions[-1].reasons["bad"].message
    assert [record.message.split(":")[0] for record in caplog.records] == ["bad can't be scaled, and stays as it is"]


def test_it_is_decided_again_once_that_works(caplog: pytest.LogCaptureFixture) -> None:
    isolation = Isolation()
    assert added(isolation, view()) == ["good"]
    remembered = isolation.decide(view()).memory
    assert sorted(added(isolation, view(memory=remembered))) == ["bad", "good"]
    assert added(isolation, view()) == ["good"]
    assert len(caplog.records) == 1


def test_one_that_was_deleted_is_forgotten() -> None:
    isolation = Isolation()
    isolation.decide(view())
    decision = isolation.decide(view(specs={"good": SPECS["good"]}))
    assert [function for function, _, _ in decision.add] == ["good"] and "bad" not in decision.reasons


def test_its_replicas_stay_where_they_are_and_so_does_their_host() -> None:
    busy = Placed("bad-1", "bad", "v1", "m", "cuda:0", "ready", inflight=1)
    pool = Pool("p", 1.0, max_hosts=2, asked=1)
    seen = view(
        hosts={"m": ["cuda:0"]},
        placed=(busy,),
        pools=(pool,),
        machines=(Machine("m", "p", "ready"),),
        rules=Rules(host_idle_s=0.0),
    )
    decision = Isolation().decide(seen)
    assert decision.keep == (busy,) and decision.drain == () and decision.retire == ()
    assert decision.add == () and decision.hosts == {"p": 2}, "its seat is taken: the other needs a host of its own"
    assert not any("bad" in action for action in decision.actions)


def test_what_is_no_functions_fault_is_raised() -> None:
    with pytest.raises(TypeError):
        Isolation().decide(replace(view(memory=Memory()), pools=(Pool("p", "dear"),)))  # type: ignore[arg-type]


async def wanted(cluster: Cluster) -> list[str]:
    return [record["spec"]["name"] for record in (await cluster.wanted())["h"].values()]


async def test_a_controller_wakes_the_others(broker: Broker, cluster: Cluster) -> None:
    controller = Controller(broker, cluster, Leadership(cluster, "c"), LocalProvider(cluster, 0), Rules())
    await cluster.report_host("h", {"devices": ["cpu"], "replicas": {}})
    for name in SPECS:
        await cluster.put_function(name, FunctionSpec(name, "python", version="v1", scaling=Scaling()).to_dict())
        await broker.enqueue(NewJob(id=new_job_id(name), function=name, tenant="", payload=b""))
    controller._memory, controller._failures = Memory({"bad": BROKEN}), {"bad": Failures("v1")}
    await controller._try_sweep()
    assert (await cluster.fleet())["reasons"]["bad"]["code"] == "not_scaled"
    assert await wanted(cluster) == ["good"]
    await controller._try_sweep()
    assert sorted(await wanted(cluster)) == ["bad", "good"]


async def test_a_sweep_that_fails_again_and_again_tells_so_once(
    broker: Broker, cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = Controller(broker, cluster, Leadership(cluster, "c"), LocalProvider(cluster, 0), Rules())
    monkeypatch.setattr(cluster, "wanted", lambda: 1 / 0)
    for _ in range(5):
        await controller._try_sweep()
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == [
        "sweep failed, and is tried again"
    ]
