"""Controllers on a real server, and a host that reports what the test says."""

from typing import Any

import pytest
from redis.asyncio import Redis

from stoker.queue.broker import Broker
from stoker.queue.cluster import STARTS, STARTS_TTL_MS, Cluster
from stoker.queue.records import NewJob, new_job_id
from stoker.runtime.controller.controller import Controller
from stoker.runtime.controller.leader import Leadership
from stoker.runtime.controller.policy_state import Rules
from stoker.runtime.controller.provider import LocalProvider
from stoker.runtime.spec import FunctionSpec, Scaling

ERROR = {"type": "cold_start_error", "message": "no such module", "code": "ModuleNotFoundError"}


def spec(version: str, born: str = "b") -> dict[str, Any]:
    scaling = Scaling(idle_timeout_s=0)
    return FunctionSpec(name="f", kind="python", version=version, born=born, scaling=scaling).to_dict()


def controller(broker: Broker, cluster: Cluster, name: str) -> Controller:
    return Controller(broker, cluster, Leadership(cluster, name), LocalProvider(cluster, 0), Rules())


async def report(cluster: Cluster, **states: str) -> None:
    """The host's replicas are in these states, by version; others have stopped."""
    replicas = {
        id: {"function": "f", "state": states[version], "error": ERROR if states[version] == "failed" else None}
        for id, record in (await cluster.wanted()).get("h", {}).items()
        if (version := record["spec"]["version"]) in states
    }
    await cluster.report_host("h", {"devices": ["cpu"], "replicas": replicas})


async def proven(cluster: Cluster) -> dict[str, FunctionSpec]:
    return {name: FunctionSpec.from_dict(record) for name, record in (await cluster.proven()).items()}


async def wanted(cluster: Cluster) -> list[str]:
    return sorted(record["spec"]["version"] for record in (await cluster.wanted()).get("h", {}).values())


async def test_the_proven_version_is_woken_also_by_the_next_controller(
    broker: Broker, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    first, job = controller(broker, cluster, "first"), new_job_id("f")
    await cluster.put_function("f", spec("v1"))
    await report(cluster)
    await broker.enqueue(NewJob(id=job, function="f", tenant="", payload=b""))
    await first.sweep()
    await report(cluster, v1="ready")
    await first.sweep()
    assert await proven(cluster) == {"f": FunctionSpec.from_dict(spec("v1"))}
    await broker.cancel(job)
    await first.sweep()
    assert await wanted(cluster) == []
    await cluster.release_leadership("first")

    await cluster.put_function("f", spec("v2"))
    second = controller(broker, cluster, "second")
    await broker.enqueue(NewJob(id=new_job_id("f"), function="f", tenant="", payload=b""))
    await second.sweep()
    assert await wanted(cluster) == ["v2"]
    await report(cluster, v2="failed")
    await second.sweep()
    assert await wanted(cluster) == ["v1", "v2"], "the first failure is tried again at once"
    await report(cluster, v1="ready", v2="failed")
    await second.sweep()
    assert await wanted(cluster) == ["v1"]
    assert (await cluster.fleet())["rollouts"] == {
        "f": {"version": "v2", "serving": "v1", "error": "no such module"},
    }
    assert caplog.messages.count("f: version v2 does not start: no such module; version v1 serves") == 1
    assert await cluster.failing() == {}, "callers are served"

    await cluster.put_function("f", spec("v3"))
    await second.sweep()
    assert await wanted(cluster) == ["v1", "v3"]
    await report(cluster, v1="ready", v3="ready")
    await second.sweep()
    assert await proven(cluster) == {"f": FunctionSpec.from_dict(spec("v3"))}
    assert (await cluster.fleet())["rollouts"] == {}
    await cluster.put_function("f", spec("v4", born="again"))
    await second.sweep()
    assert await cluster.proven() == {}


async def test_a_start_that_is_asked_for_is_tried_once(broker: Broker, cluster: Cluster, redis: Redis) -> None:
    leader = controller(broker, cluster, "first")
    await cluster.put_function("f", spec("v1"))
    await report(cluster)
    await leader.sweep()
    assert await wanted(cluster) == []
    await cluster.ask_start("f")
    assert 0 < await redis.pttl(STARTS) <= STARTS_TTL_MS
    await leader.sweep()
    assert await wanted(cluster) == ["v1"]
    await report(cluster, v1="failed")
    for _ in range(3):
        await leader.sweep()
    assert await wanted(cluster) == [] and (await cluster.fleet())["rollouts"]["f"]["error"] == "no such module"
    await cluster.ask_start("f")
    await leader.sweep()
    assert await wanted(cluster) == ["v1"] and (await cluster.fleet())["rollouts"] == {}
    await report(cluster, v1="ready")
    await leader.sweep()
    assert await wanted(cluster) == [], "its idle timeout is 0"
    assert await proven(cluster) == {"f": FunctionSpec.from_dict(spec("v1"))}
