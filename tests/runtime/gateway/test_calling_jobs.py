"""A call that waits for a replica which is busy with the job that made the call says so."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from stoker.queue.broker import Broker
from stoker.queue.cluster import Cluster
from stoker.queue.records import Completion
from stoker.runtime.current_job import CALLER
from stoker.runtime.spec import Limits

from .conftest import Login
from .peers import Deploy, make_key

FULL = {"code": "max_replicas", "message": "all 1 replicas are busy and max_replicas is 1", "eta_s": None}


@pytest.fixture
async def fleet(cluster: Cluster) -> AsyncIterator[Cluster]:
    yield cluster
    await cluster.report_fleet({})


async def queued(http: httpx.AsyncClient, function: str, caller: str = "") -> str:
    headers = {CALLER: caller} if caller else {}
    return (await http.post(f"/v1/functions/{function}/jobs", json=1, headers=headers)).json()["id"]


async def reason_of(http: httpx.AsyncClient, job_id: str) -> str:
    """Once the gateway knows what was told last."""
    await asyncio.sleep(1.1)
    return (await http.get(f"/v1/jobs/{job_id}")).json()["wait_reason"]


async def test_the_job_that_led_to_the_call_is_named(
    http: httpx.AsyncClient, broker: Broker, fleet: Cluster, deploy: Deploy
) -> None:
    f, g = await deploy(), await deploy()
    outer = await queued(http, f)
    (claim,) = await broker.claim(f, "w", 1)
    itself = await queued(http, f, outer)
    between = await queued(http, g, outer)
    await broker.claim(g, "w", 1)
    back, stranger = await queued(http, f, between), await queued(http, f)
    made_up = await queued(http, f, "nothing")
    await fleet.report_fleet({"reasons": {f: {**FULL, "code": "loading"}}})
    assert outer not in await reason_of(http, itself)
    await fleet.report_fleet({"reasons": {f: FULL}})
    for waits in (itself, back):
        reason = await reason_of(http, waits)
        assert reason.startswith(f"{FULL['message']}; one of its replicas runs job {outer}, which led to this call")
        assert "max_replicas" in reason.partition(outer)[2]
    waited = await http.post(f"/v1/functions/{f}", json=1, headers={CALLER: outer, "prefer": "wait=0.1"})
    assert waited.status_code == 202 and outer in waited.json()["wait_reason"]
    for waits in (stranger, made_up):
        assert outer not in await reason_of(http, waits)
    await broker.done(f, [Completion(outer, claim.fence, b"", b"")])
    assert outer not in await reason_of(http, itself)


@pytest.mark.parametrize("by_another", [False, True])
async def test_what_runs_out_of_time_while_what_it_led_to_waits_says_so(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy, by_another: bool
) -> None:
    f, g = await deploy(limits=Limits(run_within_s=1.0)), await deploy()
    outer = await queued(http, f)
    await broker.claim(f, "w", 1)
    between = await queued(http, g, outer) if by_another else outer
    await broker.claim(g, "w", 1)
    inner = await queued(http, f, between)
    await asyncio.sleep(1.2)
    await broker.tick(f)
    error = (await http.get(f"/v1/jobs/{outer}")).json()["error"]
    assert error["code"] == "timed_out"
    assert error["message"].startswith(f"ran longer than its limit of 1 s; its code led to job {inner} of the same")
    (claim,) = await broker.claim(f, "w", 1)
    assert claim.job_id == inner
    await asyncio.sleep(1.2)
    await broker.tick(f)
    error = (await http.get(f"/v1/jobs/{inner}")).json()["error"]
    assert error["message"] == "ran longer than its limit of 1 s"


async def test_nobody_learns_of_anothers_job(
    root: httpx.AsyncClient, login: Login, broker: Broker, fleet: Cluster, deploy: Deploy
) -> None:
    ann, bob = [login((await make_key(root, name, "invoke"))["key"]) for name in ("ann", "bob")]
    shared = await deploy()
    outer = await queued(ann, shared)
    await broker.claim(shared, "w", 1)
    hers, his, operators = [await queued(client, shared, outer) for client in (ann, bob, root)]
    await fleet.report_fleet({"reasons": {shared: FULL}})
    assert outer in await reason_of(ann, hers)
    assert outer not in await reason_of(bob, his)
    # Whose function has a key of the operator's, whoever calls it.
    assert outer in await reason_of(root, operators)
