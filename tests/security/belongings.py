"""A tenant with one of everything that belongs to a tenant."""

import hashlib
import io
import json
import zipfile
from dataclasses import dataclass, field

import httpx

from stoker.queue.broker import Broker
from tests.runtime.gateway.conftest import Login
from tests.runtime.gateway.peers import Task, make_key, worker

CHAT = "/v1/chat/completions"


def bundle(code: str = "def f(x): return x") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("m.py", code)
    return buffer.getvalue()


def python_spec(code: str, entry: str = "m:f") -> dict[str, object]:
    return {"spec": {"kind": "python", "code": code, "entry": entry}}


@dataclass
class Owner:
    """`ids` by kind: function, model, app, secret, job, own_job (under an id of the client's), response, file and
    batch."""

    client: httpx.AsyncClient
    ids: dict[str, str] = field(default_factory=dict)


async def answer(task: Task) -> None:
    usage = {"prompt_tokens": len(task.payload["prompt_ids"]), "completion_tokens": 1, "cached_tokens": 0}
    await task.done({"text": "yes", "finish_reason": "stop", "usage": usage}, **usage)


async def owner(login: Login, root: httpx.AsyncClient, broker: Broker, tenant: str, weights: str) -> Owner:
    client = login((await make_key(root, tenant, "invoke", "deploy"))["key"])
    ids = {"function": "mine", "model": "chat", "app": "shop", "own_job": "order-1", "secret": "token"}
    assert (await client.put("/v1/secrets/token", json={"value": "hush"})).status_code in (200, 201)
    code = hashlib.sha256(bundle()).hexdigest()
    assert (await client.put(f"/v1/bundles/{code}", content=bundle())).status_code == 201
    functions = [{**python_spec(code)["spec"], "name": "mine"}]  # type: ignore[dict-item]
    functions.append({"kind": "llm", "weights": weights, "name": "chat"})
    assert (await client.put("/v1/apps/shop", json={"functions": functions})).status_code == 200
    async with worker(broker, f"{tenant}.chat", answer):
        ids["response"] = (await client.post("/v1/responses", json={"model": "chat", "input": "x"})).json()["id"]
    ids["job"] = (await client.post("/v1/functions/mine/jobs", json=1)).json()["id"]
    assert (await client.put("/v1/functions/mine/jobs/order-1", json=2)).status_code == 202
    body = {"model": "chat", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    line = json.dumps({"custom_id": "1", "method": "POST", "url": CHAT, "body": body}).encode()
    sent = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", line)})
    ids["file"] = sent.json()["id"]
    made = await client.post("/v1/batches", json={"endpoint": CHAT, "input_file_id": ids["file"]})
    ids["batch"] = made.json()["id"]
    return Owner(client, ids)
