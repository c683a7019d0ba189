"""An app's versions over HTTP: listed with what became of them, gone back to, bounded, their owner's."""

import asyncio
import hashlib
import itertools
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from typer.testing import CliRunner

from stoker.queue.broker import Broker
from stoker.queue.cluster import LEADER, STARTS, Cluster
from stoker.queue.records import JobState
from stoker.runtime.cli import app as cli
from stoker.runtime.client.errors import StokerError
from stoker.runtime.commands.exits import Failed
from stoker.runtime.releases import MOST_KEPT

from .conftest import Login, RunningGateway
from .peers import Task, error_of, make_key, until_state, worker, write_bundle

numbers = itertools.count()


@pytest.fixture
async def code(http: httpx.AsyncClient, tmp_path: Path) -> str:
    data = write_bundle(tmp_path)
    digest = hashlib.sha256(data).hexdigest()
    await http.put(f"/v1/bundles/{digest}", content=data)
    return digest


@pytest.fixture
def app() -> str:
    return f"shop{next(numbers)}"


def functions(code: str, app: str, concurrency: int, *names: str) -> dict[str, Any]:
    shared = {"kind": "python", "code": code, "entry": "m:f", "concurrency": concurrency}
    return {"functions": [{**shared, "name": f"{app}_{name}"} for name in names or ("f",)]}


async def versions(http: httpx.AsyncClient, app: str) -> list[dict[str, Any]]:
    response = await http.get(f"/v1/apps/{app}/versions")
    assert response.status_code == 200, response.text
    return response.json()["data"]


async def deploy(http: httpx.AsyncClient, code: str, app: str, concurrency: int, *names: str) -> str:
    response = await http.put(f"/v1/apps/{app}", json=functions(code, app, concurrency, *names))
    assert response.status_code == 200, response.text
    return response.json()["version"]


async def test_versions_are_listed_with_what_became_of_them(
    http: httpx.AsyncClient, code: str, app: str, cluster: Cluster, redis: Redis
) -> None:
    first = await deploy(http, code, app, 1)
    assert await deploy(http, code, app, 1) == first
    (row,) = await versions(http, app)
    assert (row["version"], row["current"], row["state"], row["by"]) == (first, True, "untried", "default")
    assert abs(row["deployed_at"] - time.time()) < 10
    name = f"{app}_f"
    assert row["functions"] == [{"name": name, "version": first, "state": "untried", "error": None, "others": 0}]
    await redis.set(LEADER, "test", px=60_000)
    await cluster.write_proven("test", {name: (await cluster.function(name)) or {}})
    assert (await versions(http, app))[0]["state"] == "serving"
    second = await deploy(http, code, app, 2)
    rows = await versions(http, app)
    assert [(row["version"], row["current"], row["state"]) for row in rows] == [
        (second, True, "untried"),
        (first, False, "proven"),
    ]
    rollout = {"version": second, "serving": first, "error": "no numpy"}
    await cluster.report_fleet({"rollouts": {name: rollout}})
    rows = await versions(http, app)
    assert [row["state"] for row in rows] == ["failed", "serving"]
    assert rows[0]["functions"][0]["error"] == "no numpy"
    await deploy(http, code, app, 3)
    await cluster.report_fleet({})
    await redis.delete(LEADER)
    assert [row["state"] for row in await versions(http, app)] == ["untried", "failed", "proven"]
    back = (await http.post(f"/v1/apps/{app}/rollback")).json()
    assert back["version"] == first


async def test_going_back_and_further_back_and_forward(http: httpx.AsyncClient, code: str, app: str) -> None:
    first, second, third = [await deploy(http, code, app, i) for i in (1, 2, 3)]
    path = f"/v1/apps/{app}/rollback"
    for expected in (second, first):
        body = (await http.post(path)).json()
        assert body["version"] == body["functions"][0]["version"] == expected
        assert [row["version"] for row in await versions(http, app) if row["current"]] == [expected]
    refused = await http.post(path)
    assert refused.status_code == 409 and error_of(refused)["code"] == "no_earlier_version"
    assert (await http.post(path, json={"version": third[:6]})).json()["version"] == third
    spec = (await http.get(f"/v1/functions/{app}_f")).json()["spec"]
    assert (spec["concurrency"], spec["version"]) == (3, third)
    assert [row["version"] for row in await versions(http, app)] == [third, second, first]
    assert await deploy(http, code, app, 1) == first
    assert [row["version"] for row in await versions(http, app)] == [first, third, second]


async def test_a_rollback_after_a_failed_deploy_does_not_reinstate_what_was_gone_back_from(
    http: httpx.AsyncClient, code: str, app: str
) -> None:
    first, second = [await deploy(http, code, app, i) for i in (1, 2)]
    path = f"/v1/apps/{app}/rollback"
    assert (await http.post(path)).json()["version"] == first
    third = await deploy(http, code, app, 3)
    assert (await http.post(path)).json()["version"] == first
    assert [(row["version"], row["current"]) for row in await versions(http, app)] == [
        (third, False),
        (second, False),
        (first, True),
    ]
    assert (await http.delete(f"/v1/functions/{app}_f")).status_code == 200
    assert (await http.post(path)).json()["version"] == first
    assert (await http.post(path)).status_code == 409


async def test_functions_come_and_go_with_a_version(
    http: httpx.AsyncClient, code: str, app: str, broker: Broker
) -> None:
    one = await deploy(http, code, app, 1, "f", "g")
    two = await deploy(http, code, app, 1, "f", "h")
    assert len({one, two}) == 2
    job = (await http.post(f"/v1/functions/{app}_h/jobs", json=1)).json()["id"]
    kept = (await http.post(f"/v1/functions/{app}_f/jobs", json=1)).json()["id"]
    body = (await http.post(f"/v1/apps/{app}/rollback", json={})).json()
    assert (body["version"], body["deleted"], body["cancelled_jobs"]) == (one, [f"{app}_h"], 1)
    assert {function["name"] for function in body["functions"]} == {f"{app}_f", f"{app}_g"}
    await until_state(broker, job, JobState.CANCELLED)
    await until_state(broker, kept, JobState.QUEUED)


async def test_a_function_that_was_deleted_comes_back(http: httpx.AsyncClient, code: str, app: str) -> None:
    only = await deploy(http, code, app, 1)
    assert (await http.delete(f"/v1/functions/{app}_f")).status_code == 200
    assert [row["current"] for row in await versions(http, app)] == [False]
    assert (await http.post(f"/v1/apps/{app}/rollback")).json()["version"] == only
    assert (await http.get(f"/v1/functions/{app}_f")).status_code == 200


async def test_a_function_put_alone_makes_a_version_of_its_app(http: httpx.AsyncClient, code: str, app: str) -> None:
    await deploy(http, code, app, 1, "f", "g")
    spec = {"kind": "python", "app": app, "code": code, "entry": "m:f", "concurrency": 5}
    changed = (await http.put(f"/v1/functions/{app}_g", json={"spec": spec})).json()
    newest = (await versions(http, app))[0]
    assert newest["current"] and {part["name"] for part in newest["functions"]} == {f"{app}_f", f"{app}_g"}
    assert changed["version"] in [part["version"] for part in newest["functions"]]
    await http.post(f"/v1/apps/{app}/rollback")
    assert (await http.get(f"/v1/functions/{app}_g")).json()["spec"]["concurrency"] == 1


async def test_history_is_bounded(http: httpx.AsyncClient, code: str, app: str) -> None:
    made = [await deploy(http, code, app, i) for i in range(1, MOST_KEPT + 4)]
    assert [row["version"] for row in await versions(http, app)] == made[::-1][:MOST_KEPT]


async def test_what_can_not_be_gone_back_to(http: httpx.AsyncClient, code: str, app: str) -> None:
    await deploy(http, code, app, 1)
    await deploy(http, code, app, 2)
    path = f"/v1/apps/{app}/rollback"
    for body, status, param in (({"version": 3}, 400, "version"), ([], 400, None), ({"version": "zz"}, 404, "version")):
        response = await http.post(path, json=body)
        assert (response.status_code, error_of(response)["param"]) == (status, param)
    for missing in ("nothing", "a.b"):
        for method, what in (("GET", "versions"), ("POST", "rollback")):
            response = await http.request(method, f"/v1/apps/{missing}/{what}")
            assert response.status_code == 404 and error_of(response)["code"] == "app_not_found"
    response = await http.put("/v1/apps/a.b", json=functions(code, app, 1))
    assert response.status_code == 400 and error_of(response)["param"] == "name"


async def test_code_that_is_gone_is_told(http: httpx.AsyncClient, code: str, app: str, store: Any) -> None:
    await deploy(http, code, app, 1)
    await deploy(http, code, app, 2)
    store.delete(f"bundles/{code}.zip")
    response = await http.post(f"/v1/apps/{app}/rollback")
    assert response.status_code == 400 and code in error_of(response)["message"]


async def test_versions_are_their_owner_s(root: httpx.AsyncClient, login: Login, code: str, app: str) -> None:
    keys = [await make_key(root, name, "deploy", "invoke") for name in ("seller", "rival")]
    seller, rival = [login(key["key"]) for key in keys]
    first = await deploy(seller, code, app, 1)
    await deploy(rival, code, app, 5)
    await deploy(seller, code, app, 2)
    rows = await versions(seller, app)
    assert len(rows) == 2 and rows[0]["by"] == f"seller (key {keys[0]['id']})"
    assert len(await versions(rival, app)) == 1
    assert (await root.get(f"/v1/apps/{app}/versions")).status_code == 404
    assert (await rival.post(f"/v1/apps/{app}/rollback", json={"version": first})).status_code == 404
    assert (await seller.post(f"/v1/apps/{app}/rollback")).json()["version"] == first


async def test_a_tenant_s_versions_go_with_it(root: httpx.AsyncClient, login: Login, code: str, app: str) -> None:
    seller = login((await make_key(root, "leaver", "deploy", "invoke"))["key"])
    await deploy(seller, code, app, 1)
    assert (await root.delete("/v1/tenants/leaver")).status_code < 300
    heir = login((await make_key(root, "leaver", "deploy", "invoke"))["key"])
    assert (await heir.get(f"/v1/apps/{app}/versions")).status_code == 404


async def test_a_start_is_asked_for_only_of_a_version_that_never_was_ready(
    http: httpx.AsyncClient, code: str, app: str, cluster: Cluster, redis: Redis
) -> None:
    await deploy(http, code, app, 1)
    name = f"{app}_f"
    response = await http.post(f"/v1/functions/{name}/start")
    assert (response.status_code, response.json()["name"]) == (202, name)
    assert 0 <= (await cluster.asked_starts())[name] < 60
    await redis.delete(STARTS)
    await redis.set(LEADER, "test", px=60_000)
    await cluster.write_proven("test", {name: (await cluster.function(name)) or {}})
    assert (await http.post(f"/v1/functions/{name}/start")).status_code == 202
    assert await cluster.asked_starts() == {}
    await redis.delete(LEADER)


async def test_an_app_is_removed_whole_and_can_be_brought_back(
    http: httpx.AsyncClient, code: str, app: str, broker: Broker, gateway: RunningGateway
) -> None:
    other = f"{app}x"
    await deploy(http, code, other, 1)
    version = await deploy(http, code, app, 1, "f", "g")
    job = (await http.post(f"/v1/functions/{app}_f/jobs", json=1)).json()["id"]
    gone = await http.delete(f"/v1/apps/{app}")
    assert (gone.status_code, gone.json()) == (
        200,
        {"object": "app", "name": app, "deleted": True, "functions": [f"{app}_f", f"{app}_g"], "cancelled_jobs": 1},
    )
    await until_state(broker, job, JobState.CANCELLED)
    names = [row["name"] for row in (await http.get("/v1/functions")).json()["data"]]
    assert f"{other}_f" in names and not [name for name in names if name.startswith(f"{app}_")]
    again = await http.delete(f"/v1/apps/{app}")
    assert (again.status_code, error_of(again)["code"]) == (404, "app_not_found")
    assert [(row["version"], row["current"]) for row in await versions(http, app)] == [(version, False)]
    back = await http.post(f"/v1/apps/{app}/rollback")
    assert (back.status_code, back.json()["version"]) == (200, version), back.text
    for name, lines in ((app, [f"deleted {app}_f", f"deleted {app}_g"]), (other, [f"deleted {other}_f"])):
        said = await asyncio.to_thread(CliRunner().invoke, cli, ["delete", name, "--app", "--url", gateway.url])
        assert (said.exit_code, said.output.splitlines()) == (0, lines)


async def test_delete_tells_what_it_cancelled_and_what_is_an_app(
    http: httpx.AsyncClient, code: str, app: str, broker: Broker, gateway: RunningGateway
) -> None:
    async def delete(*arguments: str) -> Any:
        return await asyncio.to_thread(CliRunner().invoke, cli, ["delete", *arguments, "--url", gateway.url])

    started, over = asyncio.Event(), asyncio.Event()

    async def wait(task: Task) -> None:
        started.set()
        await over.wait()

    await deploy(http, code, app, 1, "f", "g")
    async with worker(broker, f"{app}_f", wait):
        jobs = [(await http.post(f"/v1/functions/{app}_f/jobs", json=1)).json()["id"] for _ in range(3)]
        await asyncio.wait_for(started.wait(), 20)
        refused = await delete(app)
        assert (refused.exit_code, type(refused.exception)) == (1, Failed)
        assert f"`stoker delete --app {app}`" in str(refused.exception)
        said = await delete(f"{app}_f")
        over.set()
    assert said.output.splitlines() == [f"deleted {app}_f", "cancelled 3 queued or running jobs"]
    for job in jobs:
        await until_state(broker, job, JobState.CANCELLED)
    assert (await delete(f"{app}_g")).output.splitlines() == [f"deleted {app}_g"]
    unknown = await delete(app)
    assert isinstance(unknown.exception, StokerError) and unknown.exception.code == "model_not_found"


async def test_an_app_stays_whole_while_anothers_router_names_one_of_its_functions(
    http: httpx.AsyncClient, chat_model: str, cluster: Cluster, app: str
) -> None:
    """Its own routers go with it."""
    spec = await cluster.function(chat_model)
    assert spec
    await cluster.put_function(chat_model, {**spec, "app": app})
    router = {"routes": [{"target": chat_model, "tools": True}], "default": chat_model}
    own, foreign = f"{app}_own", f"{app}_foreign"
    for name, owner in ((own, app), (foreign, "")):
        made = await http.put(
            f"/v1/functions/{name}", json={"spec": {"kind": "router", "router": router, "app": owner}}
        )
        assert made.status_code == 201, made.text
    refused = await http.delete(f"/v1/apps/{app}")
    assert (refused.status_code, error_of(refused)["code"]) == (409, "function_in_use")
    assert await cluster.function(chat_model) and await cluster.function(own)
    await http.delete(f"/v1/functions/{foreign}")
    gone = await http.delete(f"/v1/apps/{app}")
    assert gone.json()["functions"] == sorted([chat_model, own])


async def test_nobody_removes_anothers_app(root: httpx.AsyncClient, login: Login, code: str, app: str) -> None:
    ann = login((await make_key(root, "ann", "invoke", "deploy"))["key"])
    bob = login((await make_key(root, "bob", "invoke", "deploy"))["key"])
    await deploy(ann, code, app, 1)
    for stranger, name in ((bob, app), (root, app), (root, f"ann.{app}")):
        assert (await stranger.delete(f"/v1/apps/{name}")).status_code == 404
    caller = login((await make_key(root, "ann", "invoke"))["key"])
    assert (await caller.delete(f"/v1/apps/{app}")).status_code == 403
    assert (await ann.delete(f"/v1/apps/{app}")).json()["functions"] == [f"{app}_f"]
