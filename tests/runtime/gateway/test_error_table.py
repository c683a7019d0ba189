"""Every error that the gateway can answer: status, type, code, param and message, through a running gateway.

The last test reads the gateway's sources: an error that is made there and stands in no row here fails it.
"""

import ast
import asyncio
import hashlib
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from stoker.queue import keys
from stoker.queue.broker import Broker
from stoker.queue.cluster import Change, Cluster
from stoker.queue.records import Limits
from stoker.runtime.gateway import routing, secret_routes, structured, tenant_routes
from stoker.runtime.gateway.errors import STATE_ERROR
from stoker.runtime.gateway.registry import FRESH_S
from stoker.runtime.spec import FunctionSpec
from stoker.runtime.tenancy.vault import Vault
from tests.connections import connected

from .conftest import Login, RunningGateway, running
from .error_cases import CASES, HELLO, INVALID, Case
from .peers import PATIENCE_S, Deploy, error_of, make_key, worker

pytestmark = pytest.mark.real_model

GATEWAY = Path(structured.__file__).parent
EMPTY_ZIP = b"PK\5\6" + bytes(18)
EMPTY_ZIP_SHA = hashlib.sha256(EMPTY_ZIP).hexdigest()


@dataclass
class World:
    """What a row may use."""

    http: httpx.AsyncClient
    gateway: RunningGateway
    broker: Broker
    cluster: Cluster
    redis: Redis
    f: str
    chat: str
    embed: str
    root: httpx.AsyncClient
    login: Login
    patch: pytest.MonkeyPatch
    tmp_path: Path

    def filled(self, value: Any) -> Any:
        """`value` with names in the places of their marks."""
        text = json.dumps(value)
        for mark in ("f", "chat", "embed"):
            text = text.replace(f"<{mark}>", getattr(self, mark))
        return json.loads(text)

    async def client(self, who: str) -> httpx.AsyncClient:
        if who == "open":
            return self.http
        if who == "admin":
            await self.root.put("/v1/tenants/acme", json={})
            return self.root
        if who == "stranger":
            return self.login("sk-stoker-aaaaaaaa-" + "a" * 43)
        return self.login((await make_key(self.root, "acme", who))["key"] if who == "invoke" else "")

    async def file(self, purpose: str) -> str:
        made = await self.http.post("/v1/files", data={"purpose": purpose}, files={"file": b"{}\n"})
        return made.json()["id"]


@pytest.fixture
async def embedder(cluster: Cluster, minilm_store_url: str) -> AsyncIterator[str]:
    spec = FunctionSpec(name="embed_table", kind="embed", weights=minilm_store_url, version="1")
    await cluster.put_function(spec.name, spec.to_dict())
    yield spec.name
    await cluster.delete_function(spec.name)


@pytest.fixture
async def world(
    http: httpx.AsyncClient,
    gateway: RunningGateway,
    broker: Broker,
    cluster: Cluster,
    redis: Redis,
    deploy: Deploy,
    chat_model: str,
    embedder: str,
    root: httpx.AsyncClient,
    login: Login,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> World:
    name = await deploy()
    return World(http, gateway, broker, cluster, redis, name, chat_model, embedder, root, login, monkeypatch, tmp_path)


def check(response: httpx.Response, world: World, row: "Case | Scene") -> None:
    error = error_of(response)
    expected = (row.status, row.type, row.code, row.param)
    assert (response.status_code, error["type"], error["code"], error["param"]) == expected, error
    assert re.fullmatch(pattern(world.filled(row.message)), error["message"]), error["message"]
    assert row.status not in (429, 503) or int(response.headers["retry-after"]) >= 1


def pattern(message: str) -> str:
    return "(?s)" + ".+".join(map(re.escape, message.split("…")))


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_what_requests_provoke(world: World, case: Case) -> None:
    method, path = world.filled(case.request).split(" ")
    body = world.filled(case.json)
    for purpose in ("evals", "batch"):
        if f"<{purpose} file>" in str(body):
            body["input_file_id"] = await world.file(purpose)
    client = await world.client(case.as_)
    send = case.send if body is None else {**case.send, "json": body}
    check(await client.request(method, path, **send), world, case)


Scenery = Callable[[World], Awaitable[httpx.Response]]


@dataclass(frozen=True)
class Scene:
    """An error that needs more than one request. `inside`: code and message of another that it tells about."""

    play: Scenery
    status: int
    type: str
    code: str | None
    param: str | None
    message: str
    inside: tuple[str, str] | None = None


async def slow_body(world: World) -> httpx.Response:
    async def dripping() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(1.5)

    return await world.http.post("/v1/completions", content=dripping())


async def many_headers(world: World) -> httpx.Response:
    return await world.http.get("/healthz", headers={f"x-{number}": "x" for number in range(200)})


async def nonsense(world: World) -> httpx.Response:
    host, _, port = world.gateway.url.removeprefix("http://").partition(":")
    async with connected(host, int(port)) as (reader, writer):
        writer.write(b"HELO gateway\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = [(line.partition(": ")[0], line.partition(": ")[2]) for line in lines]
    return httpx.Response(int(status.split()[1]), headers=headers, content=body)


async def key_reused(world: World) -> httpx.Response:
    headers = {"idempotency-key": "table"}
    await world.http.post(f"/v1/functions/{world.f}/jobs", json=1, headers=headers)
    return await world.http.post(f"/v1/functions/{world.f}/jobs", json=2, headers=headers)


async def file_in_use(world: World) -> httpx.Response:
    body = {"model": world.chat, "prompt": "Hello"}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}).encode()
    sent = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", line)}}
    file_id = (await world.http.post("/v1/files", **sent)).json()["id"]
    wanted = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch_id = (await world.http.post("/v1/batches", json=wanted)).json()["id"]
    response = await world.http.delete(f"/v1/files/{file_id}")
    await world.http.post(f"/v1/batches/{batch_id}/cancel")
    return response


async def own_id_reused(world: World) -> httpx.Response:
    await world.http.put(f"/v1/functions/{world.f}/jobs/mine", json=1)
    return await world.http.put(f"/v1/functions/{world.f}/jobs/mine", json=2)


async def queue_full(world: World) -> httpx.Response:
    await world.broker.set_limits(world.f, Limits(max_queued=1))
    await world.http.post(f"/v1/functions/{world.f}/jobs", json=1)
    return await world.http.post(f"/v1/functions/{world.f}/jobs", json=1)


async def limited(world: World, **limits: float) -> httpx.Response:
    """The second call of a tenant that may do one."""
    client = world.login((await make_key(world.root, "table", "invoke"))["key"])
    await world.root.put("/v1/tenants/table", json={"limits": limits})
    await asyncio.sleep(0.6)
    await world.root.put(f"/v1/prices/{world.f}", json={"request": 1})
    await client.post(f"/v1/functions/{world.f}/jobs", json=1)
    return await client.post(f"/v1/functions/{world.f}/jobs", json=1)


async def failing_to_start(world: World) -> httpx.Response:
    error = {"type": "cold_start_error", "code": "Truncated", "message": "shard 2 is short"}
    note = {"version": "", "count": 4, "retry_at": time.time() + 30, "error": error}
    await world.cluster.report_failing({world.f: note})
    await asyncio.sleep(1.1)
    response = await world.http.post(f"/v1/functions/{world.f}", json=1)
    await world.cluster.report_failing({})
    return response


async def tokenizer_gone(world: World) -> httpx.Response:
    spec = FunctionSpec(name="bare", kind="llm", weights=(world.tmp_path / "none").as_uri(), version="1")
    await world.cluster.put_function("bare", spec.to_dict())
    response = await world.http.post("/v1/chat/completions", json={"model": "bare", "messages": HELLO})
    await world.cluster.delete_function("bare")
    return response


async def no_store(world: World, method: str, path: str, **send: Any) -> httpx.Response:
    (world.tmp_path / "file").write_bytes(b"")
    store_url = (world.tmp_path / "file").as_uri()
    settings = replace(world.gateway.settings, gateway_id="storeless", store_url=store_url)
    with running(settings) as other:
        async with httpx.AsyncClient(base_url=other.url, timeout=20) as client:
            return await client.request(method, path, **send)


async def no_queue(world: World) -> httpx.Response:
    """The server refuses writes, as one does that lost its disk or its master."""
    await world.redis.config_set("min-replicas-to-write", "1")
    try:
        return await world.http.post(f"/v1/functions/{world.f}/jobs", json=1)
    finally:
        await world.redis.config_set("min-replicas-to-write", "0")


async def stopping(world: World) -> httpx.Response:
    with world.patch.context() as patch:
        patch.setattr(world.gateway.inside.followings, "over", True)
        return await world.http.post(f"/v1/functions/{world.f}", json=1)


async def broken_record(world: World) -> httpx.Response:
    job = (await world.http.post(f"/v1/functions/{world.f}/jobs", json=1)).json()["id"]
    record = keys.key(world.f, f"j:{job}")
    kept = await world.redis.dump(record)
    await world.redis.set(record, b"no hash")
    response = await world.http.get(f"/v1/jobs/{job}")
    # What goes through all jobs of the server, as a tenant's removal does, would stumble over it.
    await world.redis.restore(record, 0, kept, replace=True)
    return response


async def expired(world: World) -> httpx.Response:
    job = (await world.http.post(f"/v1/functions/{world.f}/jobs", json=1)).json()["id"]
    await world.broker.cancel(job)
    await world.redis.delete(keys.key(world.f, f"j:{job}"))
    return await world.http.get(f"/v1/jobs/{job}")


async def without_webhook(world: World) -> httpx.Response:
    job = (await world.http.post(f"/v1/functions/{world.f}/jobs", json=1)).json()["id"]
    return await world.http.post(f"/v1/jobs/{job}/webhook-deliveries/replay")


async def not_replayable(world: World) -> httpx.Response:
    job = (await world.http.post(f"/v1/functions/{world.f}/jobs", json=1)).json()["id"]
    return await world.http.post(f"/v1/jobs/{job}/replay")


async def cancelled(world: World) -> httpx.Response:
    waiting = asyncio.create_task(world.http.post(f"/v1/functions/{world.f}", json=1))
    async with asyncio.timeout(PATIENCE_S):
        while not (await world.broker.backlogs([world.f]))[world.f].queued:
            await asyncio.sleep(0.01)
    claim = (await world.broker.claim(world.f, "w", 1))[0]
    await world.broker.cancel(claim.job_id)
    await world.broker.tick(world.f)
    return await waiting


async def limited_in_time(world: World, *, claimed: bool, **limits: float) -> httpx.Response:
    spec = FunctionSpec.from_dict({**(await world.cluster.function(world.f) or {}), "limits": limits})
    await world.cluster.put_function(world.f, spec.to_dict())
    await asyncio.sleep(1.1)
    waiting = asyncio.create_task(world.http.post(f"/v1/functions/{world.f}", json=1))
    while not waiting.done():
        if claimed:
            await world.broker.claim(world.f, "w", 1)
        await world.broker.tick(world.f)
        await asyncio.sleep(0.05)
    return await waiting


async def never_done(world: World) -> httpx.Response:
    """Its only attempt is lost with its worker."""
    spec = FunctionSpec.from_dict({**(await world.cluster.function(world.f) or {}), "limits": {"max_attempts": 1}})
    await world.cluster.put_function(world.f, spec.to_dict())
    await asyncio.sleep(1.1)
    waiting = asyncio.create_task(world.http.post(f"/v1/functions/{world.f}", json=1))
    async with worker(world.broker, world.f, lambda task: task.fail({"message": "worker lost"}, retry=True)):
        return await waiting


async def boom(world: World) -> httpx.Response:
    error = {"type": "function_error", "code": "ValueError", "message": "boom"}
    async with worker(world.broker, world.f, lambda task: task.fail(error)):
        return await world.http.post(f"/v1/functions/{world.f}", json=1)


async def no_keys_here(world: World) -> httpx.Response:
    await world.http.put("/v1/tenants/keyless", json={})
    response = await world.http.post("/v1/tenants/keyless/keys", json={})
    await world.http.delete("/v1/tenants/keyless")
    return response


async def too_many_keys(world: World) -> httpx.Response:
    world.patch.setattr(tenant_routes, "MOST_KEYS", 1)
    await make_key(world.root, "acme", "invoke")
    return await world.root.post("/v1/tenants/acme/keys", json={})


async def slow_grammar(world: World) -> httpx.Response:
    world.patch.setattr(structured, "PATIENCE_S", 0.0)
    form = {"structured_outputs": {"regex": "[a-z]+"}}
    return await world.http.post("/v1/chat/completions", json={"model": world.chat, "messages": HELLO, **form})


async def refused_by_template(world: World) -> httpx.Response:
    from stoker.runtime.gateway.chat_template import ChatTemplate, TemplateRefused

    def refuse(*_: Any) -> str:
        raise TemplateRefused("roles must alternate")

    world.patch.setattr(ChatTemplate, "render", refuse)
    return await world.http.post("/v1/chat/completions", json={"model": world.chat, "messages": HELLO})


async def batch_that_is_over(world: World) -> httpx.Response:
    body = {"endpoint": "/v1/completions", "input_file_id": await world.file("batch")}
    batch = (await world.http.post("/v1/batches", json=body)).json()["id"]
    async with asyncio.timeout(PATIENCE_S):
        while (await world.http.get(f"/v1/batches/{batch}")).json()["status"] != "completed":
            await asyncio.sleep(0.05)
    return await world.http.post(f"/v1/batches/{batch}/cancel")


async def bad_event_id(world: World) -> httpx.Response:
    job = (await world.http.post(f"/v1/functions/{world.f}/jobs", json=1)).json()["id"]
    return await world.http.get(f"/v1/jobs/{job}/events", headers={"last-event-id": "x"})


async def log_of_the_operators_function(world: World) -> httpx.Response:
    client = await world.client("invoke")
    job = (await client.post(f"/v1/functions/{world.f}/jobs", json=1)).json()["id"]
    return await client.get(f"/v1/jobs/{job}/logs")


async def log_of_a_function_to_call(world: World) -> httpx.Response:
    return await (await world.client("invoke")).get(f"/v1/functions/{world.f}/logs")


async def rolled_back(world: World, body: Any, *, foreign: bool = False) -> httpx.Response:
    """Of an app with two versions, whose names begin alike, the first of which may have been another stoker's."""
    spec = {**(await world.cluster.function(world.f) or {}), "app": "table", "version": "v1"}
    older = {**spec, "version": "v2", **({"colour": "red"} if foreign else {})}
    kept = {
        version: {"specs": {world.f: each}, "deployed_at": at, "by": "me", "fates": {}, "errors": {}}
        for version, each, at in (("v1", spec, 1.0), ("v2", older, 2.0))
    }
    await world.cluster.change_functions("table", lambda *_: Change({world.f: spec}, [], kept))
    try:
        return await world.http.post("/v1/apps/table/rollback", json=body)
    finally:
        await world.cluster.forget_apps(["table"])


async def untaught(world: World) -> httpx.Response:
    """Its embedding model goes while it is deployed."""
    world.patch.setattr(routing, "why_no_target", lambda *_: "")
    routes = [{"target": world.chat, "examples": ["a"]}, {"target": "other", "examples": ["b"]}]
    settings = {"routes": routes, "default": world.chat, "embed": "gone"}
    response = await world.http.put("/v1/functions/lost", json={"spec": {"kind": "router", "router": settings}})
    await world.http.delete("/v1/functions/lost")
    return response


async def named_by_a_router(world: World) -> httpx.Response:
    settings = {"routes": [{"target": world.chat, "tools": True}], "default": world.chat}
    await world.http.put("/v1/functions/front", json={"spec": {"kind": "router", "router": settings}})
    response = await world.http.delete(f"/v1/functions/{world.chat}")
    await world.http.delete("/v1/functions/front")
    return response


async def adapter_that_is_none(world: World) -> httpx.Response:
    model = await world.cluster.function(world.chat)
    assert model
    adapters = {"sql": (world.tmp_path / "none").as_uri()}
    spec = {"kind": "llm", "weights": model["weights"], "adapters": adapters}
    return await world.http.put("/v1/functions/adapted", json={"spec": spec})


async def nothing_left(world: World) -> httpx.Response:
    settings = {"routes": [{"target": world.chat, "tools": True}], "default": world.chat}
    await world.http.put("/v1/functions/bare", json={"spec": {"kind": "router", "router": settings}})
    model = await world.cluster.function(world.chat)
    assert model
    await world.cluster.delete_function(world.chat)
    await asyncio.sleep(FRESH_S)
    response = await world.http.post("/v1/completions", json={"model": "bare", "prompt": "x"})
    await world.cluster.put_function(world.chat, model)
    await asyncio.sleep(FRESH_S)
    await world.http.delete("/v1/functions/bare")
    return response


LIMIT, AWAY = "rate_limit_exceeded", "server_error"


async def too_long_a_check(world: World) -> httpx.Response:
    levels = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    schema = {"$defs": {**levels, "d40": {"type": "integer"}}, "$ref": "#/$defs/d0"}
    spec = FunctionSpec(name="endless_table", kind="python", code="0" * 64, entry="m:f", input_schema=schema)
    await world.cluster.put_function(spec.name, spec.to_dict())
    response = await world.http.post(f"/v1/functions/{spec.name}", json=1, timeout=120)
    await world.cluster.delete_function(spec.name)
    return response


async def misfit(world: World) -> httpx.Response:
    spec = FunctionSpec(
        name="typed_table", kind="python", code="0" * 64, entry="m:f", input_schema={"type": "integer", "title": "n"}
    )
    await world.cluster.put_function(spec.name, spec.to_dict())
    response = await world.http.post(f"/v1/functions/{spec.name}", json={"n": 1})
    await world.cluster.delete_function(spec.name)
    return response


async def secret_used(world: World) -> httpx.Response:
    spec = FunctionSpec(name="secret_table", kind="python", code="0" * 64, entry="m:f", secrets=("token",))
    await world.cluster.put_function(spec.name, spec.to_dict())
    response = await world.http.delete("/v1/secrets/token")
    await world.cluster.delete_function(spec.name)
    return response


async def too_many_secrets(world: World) -> httpx.Response:
    world.patch.setattr(Vault, "usable", True)
    world.patch.setattr(secret_routes, "MOST_SECRETS", 0)
    return await world.http.put("/v1/secrets/token", json={"value": "x"})


async def result_too_soon(world: World) -> httpx.Response:
    posted = await world.http.post(f"/v1/functions/{world.f}/jobs", json=1)
    return await world.http.get(f"{posted.headers['location']}/result")


SCENES = [
    Scene(
        misfit,
        422,
        INVALID,
        "invalid_input",
        None,
        'Invalid input: {"n":1} is not of type "integer" (the only parameter \'n\' gets the whole body: send 1).',
    ),
    Scene(
        too_long_a_check,
        422,
        INVALID,
        "input_check_too_long",
        None,
        "The input can't be checked against the function's schema: doing so takes longer than 2 s. Send a smaller "
        "input, or deploy the function with a simpler schema.",
    ),
    Scene(
        secret_used,
        409,
        INVALID,
        "secret_in_use",
        "name",
        "Secret 'token' is used by secret_table: deploy without it first.",
    ),
    Scene(too_many_secrets, 400, INVALID, "too_many_secrets", None, "There are 0 secrets: delete some first."),
    Scene(result_too_soon, 409, INVALID, "job_not_finished", "id", "Job '…' is queued; it has no result yet."),
    Scene(slow_body, 408, INVALID, "request_timeout", None, "The request body did not arrive in time."),
    Scene(
        many_headers,
        431,
        INVALID,
        "request_head_too_large",
        None,
        "A request's head may have 100 headers and 65536 bytes.",
    ),
    Scene(nonsense, 400, INVALID, None, None, "This is not a valid HTTP/1.1 request."),
    Scene(
        key_reused,
        409,
        INVALID,
        "idempotency_key_reused",
        None,
        "This idempotency key was used before with a different request body.",
    ),
    Scene(
        file_in_use,
        409,
        INVALID,
        "file_in_use",
        "id",
        "Batch '…' reads file '…'. Cancel the batch, or wait for its end, and try again.",
    ),
    Scene(
        own_id_reused,
        409,
        INVALID,
        "idempotency_key_reused",
        None,
        "The job id 'mine' was used before with a different request body.",
    ),
    Scene(expired, 410, INVALID, "result_expired", "id", "The job '…' is no longer kept."),
    Scene(
        without_webhook,
        404,
        INVALID,
        "no_webhook",
        "id",
        "This job has no webhook, or it is no longer kept.",
    ),
    Scene(
        not_replayable,
        409,
        INVALID,
        "job_not_replayable",
        "id",
        "Job '…' is queued; only a dead or a failed job can be replayed.",
    ),
    Scene(queue_full, 429, LIMIT, LIMIT, None, "max_queued: 1 jobs are waiting and the limit is 1"),
    Scene(
        lambda world: limited(world, requests_per_minute=1),
        429,
        LIMIT,
        LIMIT,
        None,
        "Tenant 'table' is at its limit of 1 (requests per minute) at the moment.",
    ),
    Scene(
        lambda world: limited(world, budget_usd=1.5),
        429,
        "insufficient_quota",
        "budget_exhausted",
        None,
        "This request could exceed what is left of the month's budget of 1.5 USD of tenant 'table': it would reserve "
        "1 USD, and 0.5 USD is left.",
    ),
    Scene(
        failing_to_start,
        503,
        "cold_start_error",
        "Truncated",
        None,
        "Function '<f>' failed to start 4 times in a row; the "
        "next try is in … s, or with the next deployment. The last error: shard 2 is short",
    ),
    Scene(tokenizer_gone, 503, "cold_start_error", "ObjectMissing", None, "The tokenizer of 'bare' can't be read: …."),
    Scene(
        lambda world: no_store(world, "POST", f"/v1/functions/{world.f}/jobs", json="x" * 100_000),
        503,
        AWAY,
        "store_unavailable",
        None,
        "…",
    ),
    Scene(
        lambda world: no_store(world, "POST", "/v1/files", data={"purpose": "batch"}, files={"file": b"x"}),
        503,
        AWAY,
        "store_unavailable",
        None,
        "The object store failed: ….",
    ),
    Scene(
        lambda world: no_store(world, "PUT", f"/v1/bundles/{EMPTY_ZIP_SHA}", content=EMPTY_ZIP),
        503,
        AWAY,
        "StoreUnavailable",
        None,
        "The object store failed: ….",
    ),
    Scene(
        no_queue, 503, AWAY, "queue_unavailable", None, "The request queue can't be reached at the moment; try again."
    ),
    Scene(stopping, 503, AWAY, "gateway_stopping", None, "The gateway stops, and has queued nothing; try again."),
    Scene(
        broken_record,
        500,
        AWAY,
        "internal_error",
        None,
        "The gateway failed to handle the request. Its log has the details under request id ….",
    ),
    Scene(boom, 500, "function_error", "ValueError", None, "boom"),
    Scene(never_done, 500, "internal_error", "attempts_exhausted", None, "worker lost"),
    Scene(cancelled, 499, "cancelled_error", "job_cancelled", None, "…"),
    Scene(
        lambda world: limited_in_time(world, claimed=False, start_within_s=0.1),
        504,
        "timeout_error",
        "expired_before_start",
        None,
        "not started within its limit of 0.1 s",
    ),
    Scene(
        lambda world: limited_in_time(world, claimed=True, run_within_s=0.1),
        504,
        "timeout_error",
        "timed_out",
        None,
        "ran longer than its limit of 0.1 s",
    ),
    Scene(
        no_keys_here,
        409,
        INVALID,
        "keys_not_used",
        None,
        "This gateway asks for no keys, so it makes none: start it with --auth keys (STOKER_AUTH=keys).",
    ),
    Scene(too_many_keys, 400, INVALID, "too_many_keys", None, "Tenant 'acme' has 1 keys: revoke some first."),
    Scene(
        slow_grammar,
        400,
        INVALID,
        "invalid_grammar",
        "structured_outputs",
        "The answer can't be held to this 'structured_outputs': it took longer than 0 s to compile.",
    ),
    Scene(
        refused_by_template,
        400,
        INVALID,
        None,
        "messages",
        "The model's chat template refused the messages: roles must alternate.",
    ),
    Scene(
        lambda world: rolled_back(world, {}),
        409,
        INVALID,
        "no_earlier_version",
        "version",
        "App 'table' has no version before the current one to go back to.",
    ),
    Scene(
        lambda world: rolled_back(world, {"version": "v"}),
        400,
        INVALID,
        None,
        "version",
        "Several versions of app 'table' begin with 'v'.",
    ),
    Scene(
        lambda world: rolled_back(world, {"version": 1}),
        400,
        INVALID,
        None,
        "version",
        "'version' must be the name of a version.",
    ),
    Scene(
        lambda world: rolled_back(world, {"version": "w"}),
        404,
        INVALID,
        "version_not_found",
        "version",
        "App 'table' has no version 'w'.",
    ),
    Scene(
        lambda world: rolled_back(world, {"version": "v2"}, foreign=True),
        400,
        INVALID,
        "invalid_spec",
        "version",
        "Version 'v2' was deployed with another release of stoker (unknown function field(s): colour); "
        "deploy it from its file.",
    ),
    Scene(batch_that_is_over, 409, INVALID, "batch_over", "id", "Batch '…' is completed; there is nothing to cancel."),
    Scene(
        log_of_a_function_to_call,
        404,
        INVALID,
        "log_not_found",
        "name",
        "The log of function '<f>' is for the function's owner.",
    ),
    Scene(
        log_of_the_operators_function,
        404,
        INVALID,
        "log_not_found",
        "id",
        "The log of job '…' is for the owner of its function.",
    ),
    Scene(
        named_by_a_router,
        409,
        INVALID,
        "function_in_use",
        "name",
        "Router 'front' names function '<chat>': deploy the router without it, or delete the router, first.",
    ),
    Scene(
        adapter_that_is_none,
        400,
        INVALID,
        "invalid_adapter",
        "spec.adapters",
        "Adapter 'sql' can't be served: ….",
    ),
    Scene(
        nothing_left,
        404,
        INVALID,
        "model_not_found",
        "model",
        "Router 'bare' has no model left: '<chat>' must be deployed as a language model.",
    ),
    Scene(
        untaught,
        503,
        AWAY,
        "router_untaught",
        None,
        "The app is deployed, but router 'lost' could not learn its examples: there is no 'gone'. What no condition "
        "decides goes to its default until the app is deployed again.",
        inside=("model_not_found", "there is no 'gone'"),
    ),
    Scene(bad_event_id, 400, INVALID, None, "Last-Event-ID", "Last-Event-ID is not an id of this stream."),
]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: f"{scene.status} {scene.code} {scene.message[:30]}")
async def test_what_situations_provoke(world: World, scene: Scene) -> None:
    check(await scene.play(world), world, scene)


@dataclass(frozen=True)
class Site:
    """A place in the sources that makes an error; `code` is None where the place doesn't say it."""

    place: str
    code: str | None
    message: str


def modules() -> dict[str, ast.Module]:
    return {path.name: ast.parse(path.read_text()) for path in sorted(GATEWAY.glob("*.py"))}


def makers(trees: dict[str, ast.Module]) -> set[str]:
    """ApiError, and all functions that make one."""
    functions = (node for tree in trees.values() for node in ast.walk(tree))
    return {"ApiError"} | {
        node.name
        for node in functions
        if isinstance(node, ast.FunctionDef) and isinstance(node.returns, ast.Name) and node.returns.id == "ApiError"
    }


def sites() -> Iterator[Site]:
    trees = modules()
    known = makers(trees)
    for name, tree in trees.items():
        constants = assigned(tree.body)
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            nodes = list(ast.walk(function))
            for call in (node for node in nodes if isinstance(node, ast.Call)):
                names = {**constants, **assigned([node for node in nodes if getattr(node, "lineno", 0) < call.lineno])}
                if isinstance(call.func, ast.Name) and call.func.id in known and call.args:
                    text = call.args[1] if call.func.id == "ApiError" else call.args[0]
                    for message in templates(text, names):
                        yield Site(f"{name}:{call.lineno}", code_of(call, names), message)


def assigned(body: list[Any]) -> dict[str, ast.expr]:
    found = [node for node in body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)]
    found.sort(key=lambda node: node.lineno)
    return {node.targets[0].id: node.value for node in found}  # type: ignore[attr-defined]


def code_of(call: ast.Call, names: dict[str, ast.expr]) -> str | None:
    for keyword in call.keywords:
        if keyword.arg == "code":
            value = names.get(keyword.value.id) if isinstance(keyword.value, ast.Name) else keyword.value
            return value.value if isinstance(value, ast.Constant) else None
    return None


def templates(text: ast.expr, names: dict[str, ast.expr]) -> list[str]:
    """The texts that an expression can make, as regular expressions."""
    if isinstance(text, ast.Constant) and isinstance(text.value, str):
        return [re.escape(text.value)]
    if isinstance(text, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else None for part in text.values)
        return ["".join(".*" if part is None else re.escape(str(part)) for part in parts)]
    if isinstance(text, ast.IfExp):
        return [*templates(text.body, names), *templates(text.orelse, names)]
    if isinstance(text, ast.Name) and text.id in names:
        return templates(names[text.id], {})
    return [".*"]


def test_no_error_is_made_that_stands_in_no_row() -> None:
    found = list(sites())
    assert len(found) > 100
    rows = [(row.code, row.message) for row in (*CASES, *SCENES)]
    rows += [scene.inside for scene in SCENES if scene.inside]
    untested = [
        site
        for site in found
        if not any(
            (site.code in (None, code)) and re.fullmatch(site.message, message, re.DOTALL) for code, message in rows
        )
    ]
    assert untested == []
    assert {code for _, code, _ in STATE_ERROR.values()} <= {code for code, _ in rows}
