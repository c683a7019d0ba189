"""Keys, scopes and ownership, through a gateway that asks for keys."""

import asyncio
import re
import time
from collections import Counter
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from stoker.coldstart.store import ObjectStore
from stoker.queue.broker import Broker
from stoker.queue.cluster import Cluster
from stoker.queue.records import JobState
from stoker.runtime.gateway.routes import ENDPOINTS
from stoker.runtime.gateway.tenant_removal import PAGE, REASON
from stoker.runtime.spec import short_name
from stoker.runtime.stored_prompts import PREFIX, object_key

from .conftest import Login
from .peers import double, error_of, make_key, worker

CODE = "ab" * 32


async def until_refused(client: httpx.AsyncClient) -> float:
    """After how many seconds."""
    began = time.monotonic()
    while (await client.get("/v1/functions")).status_code != 401:
        assert time.monotonic() - began < 20, "the key still works"
        await asyncio.sleep(0.02)
    return time.monotonic() - began


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: f"{endpoint.method} {endpoint.path}")
async def test_a_key_does_only_what_its_scopes_say(endpoint: Any, login: Login, root: httpx.AsyncClient) -> None:
    others = [scope for scope in ("invoke", "deploy", "admin") if scope != endpoint.access]
    client = login((await make_key(root, "acme", *others))["key"])
    response = await client.request(endpoint.method, re.sub(r"\{\w+\}", "x", endpoint.path))
    if endpoint.access == "anyone":
        assert response.status_code == 200
    else:
        assert response.status_code == 403
        assert response.json()["error"]["code"] == "insufficient_scope"
        assert endpoint.access in response.json()["error"]["message"]


async def test_a_key_is_shown_once_and_kept_nowhere(login: Login, root: httpx.AsyncClient, redis: Redis) -> None:
    made = await make_key(root, "acme", "invoke")
    assert (await login(made["key"]).get("/v1/functions")).status_code == 200
    listed = (await root.get("/v1/tenants/acme/keys")).json()["data"]
    assert [key["id"] for key in listed] == [made["id"]] and "key" not in listed[0]
    secret = made["key"].rpartition("-")[2] if made["key"].count("-") == 3 else made["key"][-43:]
    async for name in redis.scan_iter():
        kind = await redis.type(name)
        value = await redis.hgetall(name) if kind == b"hash" else await redis.get(name) if kind == b"string" else b""  # type: ignore[misc]
        assert secret not in str(value) and made["key"] not in str(value), name


async def test_revoked_expired_and_deleted_keys_are_dead_within_a_second(login: Login, root: httpx.AsyncClient) -> None:
    """Of some rounds the best one counts: the machine may be busy."""
    slowest = [9.0]
    while min(slowest) > 1:
        assert len(slowest) <= 4, slowest
        made = [await make_key(root, "acme", "invoke") for _ in range(2)]
        made.append(await make_key(root, "acme", "invoke", expires_in_s=2))
        revoked, deleted, expired = (login(key["key"]) for key in made)
        for client in (revoked, deleted, expired):
            assert (await client.get("/v1/functions")).status_code == 200
        assert (await root.delete(f"/v1/tenants/acme/keys/{made[0]['id']}")).json()["deleted"] is True
        took = [await until_refused(revoked)]
        await until_refused(expired)
        took.append(time.time() - made[2]["expires_at"])
        await root.delete("/v1/tenants/acme")
        took.append(await until_refused(deleted))
        slowest.append(max(took))


async def test_a_rotated_key_works_through_the_overlap(login: Login, root: httpx.AsyncClient) -> None:
    old = await make_key(root, "acme", "invoke", "deploy")
    rotated = await root.post(f"/v1/tenants/acme/keys/{old['id']}/rotate", json={"overlap_s": 2})
    new = rotated.json()
    assert rotated.status_code == 201 and new["scopes"] == ["invoke", "deploy"] and new["key"] != old["key"]
    both = [login(old["key"]), login(new["key"])]
    assert [(await client.get("/v1/functions")).status_code for client in both] == [200, 200]
    await until_refused(both[0])
    assert (await both[1].get("/v1/functions")).status_code == 200


async def test_rotating_a_key_never_makes_it_last_longer(login: Login, root: httpx.AsyncClient) -> None:
    brief = await make_key(root, "acme", "invoke", expires_in_s=3)
    path = f"/v1/tenants/acme/keys/{brief['id']}/rotate"
    for _ in range(2):
        rotated = (await root.post(path, json={"overlap_s": 3600})).json()
        assert rotated["expires_at"] == brief["expires_at"]
    await until_refused(login(brief["key"]))
    assert brief["expires_at"] <= time.time() < brief["expires_at"] + 10


def function(entry: str = "m:f") -> dict[str, Any]:
    return {"spec": {"kind": "python", "code": CODE, "entry": entry}}


@pytest.fixture
def code(store: ObjectStore) -> None:
    store.write(f"bundles/{CODE}.zip", b"")


async def test_tenants_have_functions_of_their_own_beside_the_shared_ones(
    login: Login, root: httpx.AsyncClient, broker: Broker, code: None
) -> None:
    ann, bob = [login((await make_key(root, name, "invoke", "deploy"))["key"]) for name in ("ann", "bob")]
    assert (await root.put("/v1/functions/shared", json=function())).status_code == 201
    for client, entry in ((ann, "m:ann"), (bob, "m:bob")):
        made = await client.put("/v1/functions/mine", json=function(entry))
        assert (made.status_code, made.json()["name"]) == (201, "mine")
    assert [await entries(client) for client in (ann, bob, root)] == [
        {"mine": "m:ann", "shared": "m:f"},
        {"mine": "m:bob", "shared": "m:f"},
        {"ann.mine": "m:ann", "bob.mine": "m:bob", "shared": "m:f"},
    ]
    for client in (ann, bob):
        assert (await client.delete("/v1/functions/shared")).status_code == 404
        assert (await client.get("/v1/functions/bob.mine")).status_code == 404
    async with worker(broker, "ann.mine", double):
        assert (await ann.post("/v1/functions/mine", json=4)).json() == 8
    assert (await ann.delete("/v1/functions/mine")).json()["name"] == "mine"
    assert (await ann.get("/v1/functions/mine")).status_code == 404
    assert (await bob.get("/v1/functions/mine")).status_code == 200
    assert (
        await bob.put("/v1/apps/shop", json={"functions": [{**function()["spec"], "name": "mine2"}]})
    ).status_code == 200
    assert (await ann.put("/v1/apps/shop", json={"functions": [{**function()["spec"], "name": "own"}]})).json()[
        "deleted"
    ] == []
    assert set(await entries(bob)) == {"mine", "mine2", "shared"}
    for client, names in ((ann, ["own"]), (bob, ["mine", "mine2"]), (root, ["shared"])):
        for name in names:
            assert (await client.delete(f"/v1/functions/{name}")).status_code == 200


async def entries(client: httpx.AsyncClient) -> dict[str, str]:
    listed = (await client.get("/v1/functions")).json()["data"]
    assert all(row["spec"]["name"] == short_name(row["name"]) for row in listed)
    return {row["name"]: row["spec"]["entry"] for row in listed}


async def test_another_tenants_job_is_unknown(
    login: Login, root: httpx.AsyncClient, broker: Broker, code: None
) -> None:
    ann, bob = [login((await make_key(root, name, "invoke", "deploy"))["key"]) for name in ("ann", "bob")]
    await root.put("/v1/functions/shared", json=function())
    await ann.put("/v1/functions/mine", json=function())
    for name in ("shared", "mine"):
        made = (await ann.post(f"/v1/functions/{name}/jobs", json=1)).json()
        job = made["id"]
        assert made["function"] == (await ann.get(f"/v1/jobs/{job}")).json()["function"] == name
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/events"), ("POST", "/replay")):
            response = await bob.request(method, f"/v1/jobs/{job}{path}")
            unknown = await bob.request(method, f"/v1/jobs/{job[:-1]}0{path}")
            assert response.status_code == unknown.status_code == 404
            assert response.json()["error"]["code"] == unknown.json()["error"]["code"] == "job_not_found"
        assert (await ann.get(f"/v1/jobs/{job}")).json()["state"] == "queued"
        assert (await root.get(f"/v1/jobs/{job}")).json()["state"] == "queued"
        assert (await ann.delete(f"/v1/jobs/{job}")).json()["state"] == "cancelled"
    for method, path in (
        ("POST", ""),
        ("POST", "/jobs"),
        ("PUT", "/jobs/x"),
        ("GET", "/dead"),
        ("GET", ""),
        ("DELETE", ""),
    ):
        assert (await bob.request(method, f"/v1/functions/mine{path}", json=1)).status_code == 404
    for client in (ann, bob):
        made_up = [f"/v1/jobs/{name}-{'0' * 26}" for name in ("shared", "ann.mine", "ann.none")]
        assert {(await client.get(path)).status_code for path in made_up} == {404}
    await ann.delete("/v1/functions/mine")
    await root.delete("/v1/functions/shared")


async def test_a_tenants_weight_is_its_share_of_the_workers(
    login: Login, root: httpx.AsyncClient, broker: Broker, code: None
) -> None:
    ann, bob = [login((await make_key(root, name, "invoke"))["key"]) for name in ("ann", "bob")]
    await root.patch("/v1/tenants/ann", json={"weight": 3})
    await root.put("/v1/functions/shared", json=function())
    for client in (ann, bob):
        for number in range(12):
            assert (await client.post("/v1/functions/shared/jobs", json=number)).status_code == 202
    claimed = Counter(claim.tenant for claim in await broker.claim("shared", "w", 12))
    assert claimed == {"ann": 9, "bob": 3}
    await root.delete("/v1/functions/shared")


async def test_tenants_are_created_changed_and_listed(root: httpx.AsyncClient) -> None:
    body = {"weight": 2, "limits": {"requests_per_minute": 5, "budget_usd": 1.5}}
    made = await root.put("/v1/tenants/acme", json=body)
    assert made.status_code == 201
    assert made.json()["limits"] == {
        "requests_per_minute": 5,
        "tokens_per_minute": 0,
        "concurrency": 0,
        "budget_usd": 1.5,
    }
    changed = await root.patch("/v1/tenants/acme", json={"limits": {"concurrency": 3}})
    assert changed.json()["limits"]["budget_usd"] == 1.5 and changed.json()["limits"]["concurrency"] == 3
    assert changed.json()["weight"] == 2 and changed.json()["created_at"] == made.json()["created_at"]
    assert [tenant["name"] for tenant in (await root.get("/v1/tenants")).json()["data"]] == ["acme"]
    assert (await root.get("/v1/tenants/acme")).json() == changed.json()
    assert (await root.get("/v1/tenants/nobody")).json()["error"]["code"] == "tenant_not_found"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/tenants/Acme", {}, "name"),
        ("/v1/tenants/default", {}, "name"),
        ("/v1/tenants/acme", {"weight": "heavy"}, "limits"),
        ("/v1/tenants/acme", {"limits": {"rpm": 1}}, "limits"),
        ("/v1/tenants/acme", {"limit": {}}, "limit"),
        ("/v1/tenants/acme", {"limits": 5}, "limits"),
    ],
)
async def test_bad_tenants_are_refused(root: httpx.AsyncClient, path: str, body: Any, param: str) -> None:
    response = await root.put(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [({"scopes": []}, "scopes"), ({"scopes": ["root"]}, "scopes"), ({"scopes": "invoke"}, "scopes")]
    + [({"expires_in_s": value}, "expires_in_s") for value in (-1, "1", True, 1e12)],
)
async def test_bad_keys_are_refused(root: httpx.AsyncClient, body: Any, param: str) -> None:
    await root.put("/v1/tenants/acme", json={})
    response = await root.post("/v1/tenants/acme/keys", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_an_open_gateway_makes_no_keys(http: httpx.AsyncClient) -> None:
    await http.put("/v1/tenants/acme", json={})
    response = await http.post("/v1/tenants/acme/keys", json={})
    assert (response.status_code, response.json()["error"]["code"]) == (409, "keys_not_used")
    await http.delete("/v1/tenants/acme")


async def test_a_tenant_that_is_there_is_not_created_again(root: httpx.AsyncClient) -> None:
    headers, body = {"if-none-match": "*"}, {"limits": {"budget_usd": 50}}
    assert (await root.put("/v1/tenants/acme", json=body, headers=headers)).status_code == 201
    again = await root.put("/v1/tenants/acme", json={}, headers=headers)
    assert (again.status_code, error_of(again)["code"]) == (412, "tenant_exists")
    assert (await root.get("/v1/tenants/acme")).json()["limits"]["budget_usd"] == 50


@pytest.mark.usefixtures("code")
async def test_the_work_of_a_removed_tenant_stops(login: Login, root: httpx.AsyncClient, broker: Broker) -> None:
    """Its jobs of a shared function too, those that run and more of those that wait than a page; others' go on."""
    await root.put("/v1/functions/common", json=function())
    ann, bob = [login((await make_key(root, name, "invoke"))["key"]) for name in ("ann", "bob")]
    calls = [ann.post("/v1/functions/common/jobs", json=number) for number in range(PAGE + 20)]
    jobs = [(await call).json()["id"] for call in calls]
    assert len(await broker.claim("common", "worker-common", 3)) == 3
    kept = (await bob.post("/v1/functions/common/jobs", json=1)).json()["id"]
    await root.delete("/v1/tenants/ann")
    found = [await broker.job(job) for job in jobs]
    assert {job and (job.state, job.reason) for job in found} == {(JobState.CANCELLED, REASON)}
    waiting = await broker.job(kept)
    assert waiting and waiting.state is JobState.QUEUED
    backlog = (await broker.backlogs(["common"]))["common"]
    assert (backlog.queued, backlog.running) == (1, 0)
    await root.delete("/v1/functions/common")


async def test_what_was_kept_of_prompts_goes_with_a_removed_tenant(
    login: Login, root: httpx.AsyncClient, cluster: Cluster, store: ObjectStore
) -> None:
    """Whoever gets its name would find its prompts cached: also those that a replica still has, and leaves later."""
    await make_key(root, "gone", "invoke")
    store.write(object_key("chat"), b"prompts")
    before = await cluster.era()
    assert (await root.delete("/v1/tenants/gone")).status_code == 200
    assert list(store.list(PREFIX)) == [] and await cluster.era() != before
