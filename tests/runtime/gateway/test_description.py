"""/openapi.json holds: schemathesis calls every route as it is described and compares what comes back."""

import asyncio
import hashlib
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from stoker.queue.broker import Broker
from stoker.queue.client import connect
from stoker.queue.cluster import Cluster
from stoker.queue.embedded import EmbeddedValkey
from stoker.runtime.gateway.settings import GatewaySettings
from stoker.runtime.spec import FunctionSpec
from stoker.runtime.tenancy.api_key import Keyring

from .conftest import SECRET, RunningGateway, running
from .peers import Task, worker

pytestmark = pytest.mark.real_model

EXAMPLES = 8
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
ROOT = {"authorization": f"Bearer {Keyring(SECRET).root_text()}"}


@schemathesis.serializer("application/msgpack")
def packed(_: object, value: Any) -> bytes:
    """JSON's integers may be too big for it."""
    try:
        return msgpack.packb(value)  # type: ignore[return-value]
    except (OverflowError, UnicodeEncodeError):
        return b"\xc0"


NAMES = {"python": "twice", "llm": "talker", "embed": "vectors"}


async def answer(task: Task) -> None:
    """What a worker of that kind of function sends: an echo, a text in every choice, or vectors."""
    payload = task.payload
    if payload["kind"] == "call":
        await task.emit({"value": 1})
        await task.done({"value": payload["input"]})
    elif payload["kind"] == "embed":
        vectors = bytes(4 * 384 * len(payload["texts"]))
        tokens = {"prompt_tokens": sum(map(len, payload["texts"]))}
        await task.done({"vectors": vectors, "dimension": 384, "usage": tokens}, **tokens)
    else:
        await generate(task, payload["params"].get("n", 1), payload["params"].get("logprobs"))


async def generate(task: Task, count: int, logprobs: int | None) -> None:
    entry = {"token": "hi", "logprob": -0.5, "bytes": [104, 105], "top_logprobs": []}
    choices = [{"text": "hi", "finish_reason": "stop"} for _ in range(count)]
    for index, choice in enumerate(choices):
        if logprobs is not None:
            choice["logprobs"] = [entry]  # type: ignore[assignment]
        await task.emit({"index": index, "ids": [1], **choice})
    tokens = {"prompt_tokens": len(task.payload["prompt_ids"]), "completion_tokens": count, "cached_tokens": 0}
    await task.done({"choices": choices, "usage": tokens}, **tokens)


@pytest.fixture(scope="module")
def fuzzed(
    settings: GatewaySettings, smollm2_store_url: str, minilm_store_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    """A gateway over a queue of its own, with one function of each kind and workers for them."""
    folder = tmp_path_factory.mktemp("fuzzed")
    valkey = EmbeddedValkey(folder / "valkey")
    valkey.start()
    stopping = threading.Event()
    specs = [
        FunctionSpec(name=NAMES["python"], kind="python", code="0" * 64, entry="m:f"),
        FunctionSpec(name=NAMES["llm"], kind="llm", weights=smollm2_store_url, version="1"),
        FunctionSpec(name=NAMES["embed"], kind="embed", weights=minilm_store_url, version="1"),
    ]
    thread = threading.Thread(target=lambda: asyncio.run(work(valkey.url, specs, stopping)))
    thread.start()
    try:
        with running(own(settings, valkey.url, folder)) as gateway:
            yield gateway
    finally:
        stopping.set()
        thread.join(20)
        valkey.stop()


def own(settings: GatewaySettings, redis_url: str, folder: Path) -> GatewaySettings:
    store = folder / "store"
    store.mkdir()
    return replace(
        settings, redis_url=redis_url, store_url=store.as_uri(), gateway_id="gateway-fuzzed", keys_secret=SECRET
    )


async def work(redis_url: str, specs: list[FunctionSpec], stopping: threading.Event) -> None:
    redis = connect(redis_url)
    for spec in specs:
        await Cluster(redis).put_function(spec.name, spec.to_dict())
    async with asyncio.TaskGroup() as group:
        for spec in specs:
            group.create_task(serve(redis, spec.name, stopping))
    await redis.aclose()


async def serve(redis: Any, name: str, stopping: threading.Event) -> None:
    async with worker(Broker(redis), name, answer):
        while not stopping.is_set():
            await asyncio.sleep(0.05)


class Aim:
    """Random names and ids are unknown to the gateway, and random bodies wrong: most cases are pointed at things that
    are there (made for the case, so that it may also delete them), with no more than a few of the random fields."""

    def __init__(self, client: httpx.Client, chance: random.Random) -> None:
        self._client = client
        self._chance = chance

    def at(self, case: schemathesis.Case) -> None:
        if self._chance.random() < 0.2:
            return
        for part, value in self._things(case.path, case.method).items():
            if part in case.path_parameters:
                case.path_parameters[part] = value
        if usual := self._usual(case):
            few = self._chance.sample(sorted(case.body), min(len(case.body), 2))
            case.body = {**{name: case.body[name] for name in few}, **usual}
        elif "sha256" in case.path_parameters:
            case.body = BUNDLE

    def _things(self, path: str, method: str) -> dict[str, str]:
        """What to put into the path."""
        root = path.split("/")[2] if path.startswith("/v1/") else ""
        if root == "functions" and "{id}" in path:
            mine = self._chance.randbytes(4).hex()
            if method != "PUT":
                self._client.put(f"/v1/functions/twice/jobs/{mine}", json=1)
            return {"name": "twice", "id": mine}
        if root == "tenants":
            self._client.put("/v1/tenants/acme", json={})
            return {"name": "acme", "key": self._made("/v1/tenants/acme/keys", json={})}
        if path == "/v1/jobs/{id}/result":
            return {"id": self._made("/v1/functions/twice/jobs", json=1, headers={"prefer": "wait=5"})}
        if root == "responses":
            return {"id": self._made("/v1/responses", json=RESPONSE)}
        if root in ("jobs", "files", "batches"):
            return {"id": self._thing(root)}
        name = {"apps": "fuzzed-app", "functions": "new" if method == "PUT" else self._function()}.get(root, "")
        return {"name": name, "sha256": BUNDLE_SHA, "model": NAMES["llm"], "function": NAMES["python"]}

    def _thing(self, kind: str) -> str:
        if kind == "jobs":
            return self._made("/v1/functions/twice/jobs", json=1)
        file = self._made("/v1/files", data={"purpose": "batch"}, files={"file": b"{}"})
        body = {"endpoint": "/v1/completions", "input_file_id": file}
        return file if kind == "files" else self._made("/v1/batches", json=body)

    def _function(self) -> str:
        return self._chance.choice(["twice", *NAMES.values()])

    def _made(self, path: str, **send: Any) -> str:
        return self._client.post(path, **send).raise_for_status().json()["id"]

    def _usual(self, case: schemathesis.Case) -> dict[str, Any]:
        """The fields without which nothing succeeds."""
        if case.path == "/v1/batches" and case.method == "POST":
            return {"input_file_id": self._thing("files"), "endpoint": "/v1/completions", "completion_window": "24h"}
        if case.path == "/v1/functions/{name}" and case.method == "POST":
            return CHATS if case.path_parameters["name"] == "talker" and isinstance(case.body, dict) else {}
        streamed = (
            {"stream": True}
            if ("completions" in case.path or "responses" in case.path)
            and case.method == "POST"
            and self._chance.random() < 0.3
            else {}
        )
        return {**USUAL.get(f"{case.method} {case.path}", {}), **streamed}


STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
CHATS = {"model": "talker", "messages": [{"role": "user", "content": "Hi"}]}
RESPONSE = {"model": "talker", "input": "Hi"}
BUNDLE = b"PK\5\6" + bytes(18)
BUNDLE_SHA = hashlib.sha256(BUNDLE).hexdigest()
SPEC = {"kind": "python", "code": BUNDLE_SHA, "entry": "m:f"}
USUAL: dict[str, dict[str, Any]] = {
    "POST /v1/chat/completions": CHATS,
    "POST /v1/completions": {"model": "talker", "prompt": "Hi"},
    "POST /v1/responses": RESPONSE,
    "POST /v1/embeddings": {"model": "vectors", "input": "Hi"},
    "PUT /v1/functions/{name}": {"spec": SPEC},
    "PUT /v1/apps/{name}": {"functions": [{**SPEC, "name": "part"}]},
}
# Random requests can't bring these about: they need a dead job, a failed delivery, a second version, a secret to sign
# and encrypt with.
HARD = {
    "POST /v1/jobs/{id}/replay",
    "POST /v1/jobs/{id}/webhook-deliveries/replay",
    "POST /v1/apps/{name}/rollback",
    "PUT /v1/secrets/{name}",
    "DELETE /v1/secrets/{name}",
    "GET /v1/webhooks/secret",
    "POST /v1/webhooks/secret/rotate",
}


def test_every_route_does_what_its_description_says(fuzzed: RunningGateway) -> None:
    schema = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 50
    with httpx.Client(base_url=fuzzed.url, headers=ROOT, timeout=20) as client:
        client.put(f"/v1/bundles/{BUNDLE_SHA}", content=BUNDLE).raise_for_status()
        seen = {operation.label: fuzz(operation, client) for operation in operations if not destroys(operation)}
        for route in STREAMED:
            # Whether a stream is among the few requests that are drawn is chance.
            answer = client.post(route, json={**USUAL[f"POST {route}"], "stream": True})
            seen[f"POST {route}"].add((answer.status_code, answer.headers["content-type"].partition(";")[0]))
    failed = {label for label, answers in seen.items() if not any(status < 300 for status, _ in answers)}
    assert failed <= HARD
    for route in STREAMED:
        assert {(200, "application/json"), (200, "text/event-stream")} <= seen[f"POST {route}"]


def destroys(operation: Any) -> bool:
    """What every other case needs."""
    return operation.label == "DELETE /v1/functions/{name}"


def fuzz(operation: Any, client: httpx.Client) -> set[tuple[int, str]]:
    """The statuses and types of content that were seen."""
    seen: set[tuple[int, str]] = set()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(), seed=st.integers(0, 1 << 32))
    def call(case: schemathesis.Case, seed: int) -> None:
        Aim(client, random.Random(seed)).at(case)
        response = case.call(headers=ROOT, timeout=20)
        seen.add((response.status_code, str(response.headers.get("content-type", [""])[0]).partition(";")[0]))
        case.validate_response(response, checks=CHECKS)

    call()
    return seen
