"""Row 15: whatever id of one tenant's object another tenant names, and on whatever route, there is no such object."""

import json
import re
from typing import Any

import httpx
import pytest

from stoker.coldstart.store import ObjectStore
from stoker.queue.broker import Broker
from stoker.runtime.gateway.endpoint import Endpoint
from stoker.runtime.gateway.routes import ENDPOINTS
from tests.runtime.gateway.conftest import Login
from tests.runtime.gateway.peers import error_of, make_key

from .belongings import CHAT, Owner, owner, python_spec

# Path parameters by the path that they stand in: which of the owner's ids goes there. The longest prefix counts.
IDS = {
    "/v1/functions/{name}": ("function",),
    "/v1/functions/{name}/jobs/{id}": ("function", "own_job"),
    "/v1/models/{model}": ("model",),
    "/v1/jobs/{id}": ("job",),
    "/v1/files/{id}": ("file",),
    "/v1/batches/{id}": ("batch",),
    "/v1/responses/{id}": ("response",),
    "/v1/apps/{name}": ("app",),
    "/v1/secrets/{name}": ("secret",),
}
# Names that are everybody's own: such a request makes an object of the caller's and leaves the other one alone.
MAKES_OWN = {
    ("PUT", "/v1/functions/{name}"),
    ("PUT", "/v1/apps/{name}"),
    ("PUT", "/v1/bundles/{sha256}"),
    ("PUT", "/v1/secrets/{name}"),
}


def prying() -> list[Endpoint]:
    """Every route for tenants with an id in its path: a new one has to be told about here before this passes."""
    named = [endpoint for endpoint in ENDPOINTS if "{" in endpoint.path and endpoint.access in ("invoke", "deploy")]
    return [endpoint for endpoint in named if (endpoint.method, endpoint.path) not in MAKES_OWN]


def aimed(path: str, ids: dict[str, str]) -> str:
    known = max((prefix for prefix in IDS if path.startswith(prefix)), key=len, default="")
    assert known and path.count("{") == len(IDS[known]), f"say in IDS whose ids {path} takes"
    parts = iter(ids[kind] for kind in IDS[known])
    return re.sub(r"\{\w+\}", lambda _: next(parts), path)


@pytest.fixture
async def ann(login: Login, root: httpx.AsyncClient, broker: Broker, smollm2_store_url: str) -> Owner:
    return await owner(login, root, broker, "ann", smollm2_store_url)


@pytest.fixture
async def bob(login: Login, root: httpx.AsyncClient) -> httpx.AsyncClient:
    return login((await make_key(root, "bob", "invoke", "deploy"))["key"])


async def everything(client: httpx.AsyncClient) -> dict[str, Any]:
    """What its owner sees of it, without what time alone changes."""
    pages = {path: await client.get(f"/v1/{path}") for path in ("functions", "models", "files", "batches")}
    rows = {path: [row["id" if "id" in row else "name"] for row in page.json()["data"]] for path, page in pages.items()}
    entries = {row["name"]: row["version"] for row in pages["functions"].json()["data"]}
    return {**rows, "entries": entries}


async def test_anothers_id_is_unknown_on_every_route(ann: Owner, bob: httpx.AsyncClient) -> None:
    before = await everything(ann.client)
    for endpoint in prying():
        path = aimed(endpoint.path, ann.ids)
        response = await bob.request(endpoint.method, path, json={"input": 1})
        assert response.status_code == 404, (endpoint.method, path, response.text)
        unheard_of = {kind: made_up(value) for kind, value in ann.ids.items()}
        unknown = await bob.request(endpoint.method, aimed(endpoint.path, unheard_of), json={"input": 1})
        assert (unknown.status_code, error_of(unknown)["code"]) == (404, error_of(response)["code"])
    assert await everything(ann.client) == before
    assert (await ann.client.get(f"/v1/jobs/{ann.ids['job']}")).json()["state"] == "queued"
    assert (await ann.client.get(f"/v1/files/{ann.ids['file']}/content")).status_code == 200


def made_up(id: str) -> str:
    """Of the same form, but nobody's."""
    return id[:-1] + ("1" if id[-1] != "1" else "2")


async def test_the_owner_is_let_in_where_the_other_is_not(ann: Owner) -> None:
    """Or the test above would hold for a gateway that finds nothing at all."""
    for path in ("/v1/functions/{name}", "/v1/functions/{name}/jobs/{id}", "/v1/models/{model}", "/v1/jobs/{id}"):
        assert (await ann.client.get(aimed(path, ann.ids))).status_code == 200, path
    for path in ("/v1/files/{id}", "/v1/files/{id}/content", "/v1/batches/{id}", "/v1/responses/{id}"):
        assert (await ann.client.get(aimed(path, ann.ids))).status_code == 200, path


async def test_anothers_id_in_a_body_is_unknown_too(ann: Owner, bob: httpx.AsyncClient) -> None:
    said = {"model": ann.ids["model"], "messages": [{"role": "user", "content": "x"}]}
    bodies = {
        CHAT: said,
        "/v1/completions": {"model": ann.ids["model"], "prompt": "x"},
        "/v1/embeddings": {"model": ann.ids["model"], "input": "x"},
        "/v1/batches": {"endpoint": CHAT, "input_file_id": ann.ids["file"]},
        "/v1/responses": {"model": "chat", "input": "x", "previous_response_id": ann.ids["response"]},
    }
    for path, body in bodies.items():
        response = await bob.post(path, json=body)
        assert response.status_code == 404, (path, response.text)
        error_of(response)
    for full in ("ann.chat", "ann.mine"):
        assert (await bob.post(CHAT, json={**said, "model": full})).status_code == 404
        assert (await bob.post(f"/v1/functions/{full}", json=1)).status_code == 404


async def test_the_same_names_are_objects_of_ones_own(ann: Owner, bob: httpx.AsyncClient) -> None:
    before, code = await everything(ann.client), (await ann.client.get("/v1/functions/mine")).json()["spec"]["code"]
    assert (await bob.put("/v1/functions/mine", json=python_spec(code, "m:other"))).status_code == 201
    functions = [{**python_spec(code)["spec"], "name": "theirs"}]  # type: ignore[dict-item]
    assert (await bob.put("/v1/apps/shop", json={"functions": functions})).json()["deleted"] == []
    assert (await bob.put("/v1/functions/mine/jobs/order-1", json=3)).status_code == 202
    assert await everything(ann.client) == before
    assert (await ann.client.get("/v1/functions/mine")).json()["spec"]["entry"] == "m:f"
    assert (await bob.delete("/v1/functions/mine/jobs/order-1")).json()["state"] == "cancelled"
    assert (await ann.client.get("/v1/functions/mine/jobs/order-1")).json()["state"] == "queued"


async def test_lists_and_bills_are_of_ones_own(ann: Owner, bob: httpx.AsyncClient) -> None:
    for path in ("functions", "models", "files", "batches"):
        answer = (await bob.get(f"/v1/{path}")).json()
        assert not [row for row in answer["data"] if ann.ids.get(path[:-1]) in row.values()], path
        assert "ann" not in {row.get("owner") for row in answer["data"]}
    refused = await bob.get("/v1/usage", params={"tenant": "ann"})
    assert refused.status_code == (await bob.get("/v1/usage", params={"tenant": "nobody"})).status_code == 403
    assert "ann" not in json.dumps(error_of(refused)).replace("another", "")


async def test_who_gets_a_deleted_tenants_name_finds_nothing_of_it(
    ann: Owner, root: httpx.AsyncClient, login: Login, store: ObjectStore, broker: Broker
) -> None:
    assert (await root.put("/v1/prices/ann.mine", json={"request": 1})).status_code == 200
    assert (await root.delete("/v1/tenants/ann")).json()["deleted"] is True
    heir = login((await make_key(root, "ann", "invoke", "deploy"))["key"])
    shared = await everything(root)
    seen = await everything(heir)
    assert (seen["files"], seen["batches"]) == ([], [])
    assert (seen["functions"], seen["models"]) == (shared["functions"], shared["models"])
    for endpoint in prying():
        response = await heir.request(endpoint.method, aimed(endpoint.path, ann.ids), json={"input": 1})
        assert response.status_code == 404, (endpoint.method, endpoint.path, response.text)
    assert list(store.list("files/ann/")) == list(store.list("batches/ann/")) == []
    assert "ann.mine" not in {row["function"] for row in (await root.get("/v1/prices")).json()["data"]}
    assert not (await broker.backlogs(["ann.mine"]))["ann.mine"].queued
