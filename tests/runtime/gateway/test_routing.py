"""Routers over a real queue and store; the models behind them are peers that answer from the queue."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import numpy as np
import pytest

from stoker.queue.broker import Broker
from stoker.queue.cluster import Cluster
from stoker.runtime.gateway import route_lessons
from stoker.runtime.gateway.registry import FRESH_S
from stoker.runtime.spec import FunctionSpec

from .conftest import Login
from .peers import Task, error_of, make_key, server_events, worker

pytestmark = pytest.mark.real_model

ORDERS = ["where is my order", "has my parcel been sent", "track the delivery of my order"]
TALK = ["hello who are you", "tell me a story about a fox", "what is the capital of france"]
ROUTES = [
    {"target": "big", "tools": True},
    {"target": "big", "keywords": ["explain"]},
    {"target": "little", "metadata": {"type": "look-up"}},
    {"target": "little", "examples": ORDERS},
    {"target": "big", "examples": TALK},
]

Chat = Callable[..., Any]


async def embed(task: Task) -> None:
    """Texts that share words are alike: a unit vector of the token ids, folded to 384 dimensions."""
    rows = np.zeros((len(task.payload["texts"]), 384), np.float32)
    for row, ids in zip(rows, task.payload["texts"], strict=True):
        np.add.at(row, np.array(ids[1:-1]) % 384, 1)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    usage = {"prompt_tokens": sum(map(len, task.payload["texts"]))}
    await task.done({"vectors": rows.tobytes(), "dimension": 384, "usage": usage}, **usage)


async def say(task: Task) -> None:
    usage = {"prompt_tokens": len(task.payload["prompt_ids"]), "completion_tokens": 1, "cached_tokens": 0}
    await task.done({"text": task.claim.function, "finish_reason": "stop", "usage": usage}, **usage)


class Shop:
    """An app with two language models, an encoder and a router, deployed and deleted by the test."""

    def __init__(self, http: httpx.AsyncClient, models: dict[str, str]) -> None:
        self.http = http
        self.models = models

    async def put(self, **router: Any) -> httpx.Response:
        settings = {"routes": ROUTES, "default": "big", "embed": "meaning", "min_score": 0.6, **router}
        functions = [
            {"name": "big", "kind": "llm", "weights": self.models["llm"], "limits": {"max_queued": 2}},
            {"name": "little", "kind": "llm", "weights": self.models["llm"]},
            {"name": "meaning", "kind": "embed", "weights": self.models["embed"]},
            {"name": "front", "kind": "router", "router": settings},
        ]
        return await self.http.put("/v1/apps/shop", json={"functions": functions})

    async def ask(self, text: str, *, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": "front", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)

    async def route(self, text: str, **fields: Any) -> str:
        answer = await self.ask(text, **fields)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-route"]

    async def delete(self) -> None:
        for name in ("front", "big", "little", "meaning"):
            await self.http.delete(f"/v1/functions/{name}")


@pytest.fixture
async def shop(http: httpx.AsyncClient, smollm2_store_url: str, minilm_store_url: str) -> AsyncIterator[Shop]:
    shop = Shop(http, {"llm": smollm2_store_url, "embed": minilm_store_url})
    yield shop
    await shop.delete()


@pytest.fixture
async def awake(broker: Broker, shop: Shop) -> AsyncIterator[Shop]:
    """The app with all its models awake."""
    async with AsyncExitStack() as stack:
        for name, answer in (("big", say), ("little", say), ("meaning", embed)):
            await stack.enter_async_context(worker(broker, name, answer))
        response = await shop.put()
        assert response.status_code == 200, response.text
        yield shop


async def test_requests_go_by_rules_and_by_likeness(awake: Shop) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert await awake.route("please explain the order of the parcel") == "big; reason=rule"
    assert await awake.route("hello", metadata={"type": "look-up"}) == "little; reason=rule"
    assert (await awake.route("where is the parcel of my order")).startswith("little; reason=examples; score=0.")
    assert (await awake.route("tell me about the capital")).startswith("big; reason=examples; score=0.")
    refused = await awake.ask("where is my order", tools=[tool])
    assert refused.status_code == 400 and refused.headers["x-route"] == "big; reason=rule"


async def test_an_unsure_likeness_goes_to_the_default(awake: Shop) -> None:
    assert (await awake.put(min_score=0.99)).status_code == 200
    assert (await awake.route("where is the parcel of my order")).startswith("big; reason=default; score=0.")


async def test_the_job_has_the_decision_and_its_target_the_usage(awake: Shop) -> None:
    answer = await awake.ask("has my order been sent")
    assert answer.json()["model"] == "front" and answer.json()["choices"][0]["message"]["content"] == "little"
    job = (await awake.http.get(f"/v1/jobs/{answer.headers['x-job-id']}")).json()
    assert (job["function"], job["usage"]["completion_tokens"]) == ("little", 1)
    route = job["route"]
    assert (route["router"], route["target"], route["reason"]) == ("front", "little", "examples")
    assert 0.6 <= route["score"] <= 1
    plain = await awake.http.post("/v1/completions", json={"model": "little", "prompt": "explain", "max_tokens": 2})
    job = (await awake.http.get(f"/v1/jobs/{plain.headers['x-job-id']}")).json()
    assert job["route"] is None and "x-route" not in plain.headers


async def test_streams_functions_and_batches_are_routed_too(awake: Shop) -> None:
    body = {"model": "front", "messages": [{"role": "user", "content": "has my order been sent"}], "stream": True}
    async with awake.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["x-route"].startswith("little; reason=examples")
        assert [event async for event in server_events(response)][-1].data == "[DONE]"
    called = await awake.http.post("/v1/functions/front", json={"prompt": "please explain", "max_tokens": 3})
    assert (called.headers["x-route"], called.json()["choices"][0]["text"]) == ("big; reason=rule", "big")
    put = await awake.http.put("/v1/functions/front/jobs/mine", json={"prompt": "please explain", "max_tokens": 3})
    got = await awake.http.get("/v1/functions/front/jobs/mine")
    assert (got.json()["id"], got.json()["function"]) == (put.json()["id"], "big")
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    line["body"] = {"model": "front", "prompt": "where is my order", "max_tokens": 3}
    files = {"file": ("in.jsonl", json.dumps(line).encode())}
    uploaded = (await awake.http.post("/v1/files", data={"purpose": "batch"}, files=files)).json()["id"]
    asked = {"input_file_id": uploaded, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = (await awake.http.post("/v1/batches", json=asked)).json()
    async with asyncio.timeout(30):
        while not batch["output_file_id"]:
            await asyncio.sleep(0.2)
            batch = (await awake.http.get(f"/v1/batches/{batch['id']}")).json()
    output = (await awake.http.get(f"/v1/files/{batch['output_file_id']}/content")).json()
    assert output["response"]["body"]["choices"][0]["text"] == "little"


async def test_without_an_embedding_in_time_the_default_answers(shop: Shop, broker: Broker) -> None:
    async with worker(broker, "meaning", embed):
        assert (await shop.put(classify_within_ms=200)).status_code == 200
    async with worker(broker, "big", say):
        answer = await shop.ask("where is my order")
        assert answer.headers["x-route"] == "big; reason=default"
        job = (await shop.http.get(f"/v1/jobs/{answer.headers['x-job-id']}")).json()
    assert job["route"]["detail"] == "no embedding within 200 ms"


async def test_a_router_that_could_not_learn_says_so_and_goes_to_its_default(
    shop: Shop, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = [{"target": "little", "examples": ["never seen before"]}, {"target": "big", "examples": ["nor this"]}]
    monkeypatch.setattr(route_lessons, "LEARN_S", 0.5)
    refused = await shop.put(routes=examples)
    assert (refused.status_code, error_of(refused)["code"]) == (503, "router_untaught")
    assert "could not learn its examples" in error_of(refused)["message"]
    async with worker(broker, "big", say), worker(broker, "meaning", embed):
        assert await shop.route("never seen before") == "big; reason=default"
        monkeypatch.undo()
        assert (await shop.put(routes=examples)).status_code == 200
    async with worker(broker, "little", say), worker(broker, "meaning", embed):
        assert (await shop.route("never seen before")).startswith("little; reason=examples")


async def test_the_fallback_takes_what_has_no_room_and_a_repeated_request_stays(shop: Shop, broker: Broker) -> None:
    rules = [{"target": "big", "keywords": ["explain"]}]
    assert (await shop.put(routes=rules, embed="", fallbacks={"big": "little"})).status_code == 200
    first = await shop.http.put("/v1/functions/front/jobs/one", json={"prompt": "explain", "max_tokens": 2})
    await shop.http.post("/v1/functions/front/jobs", json={"prompt": "explain", "max_tokens": 2})
    assert first.headers["x-route"] == "big; reason=rule"
    async with worker(broker, "little", say):
        assert await shop.route("explain this") == "little; reason=rule; instead-of=big; because=overloaded"
    again = await shop.http.put("/v1/functions/front/jobs/one", json={"prompt": "explain", "max_tokens": 2})
    assert again.headers["x-route"] == "big; reason=repeated" and again.json()["id"] == first.json()["id"]


async def test_targets_that_are_gone_or_no_models_any_more_are_left_out(
    shop: Shop, broker: Broker, cluster: Cluster
) -> None:
    rules = [{"target": "big", "keywords": ["explain"]}]
    assert (await shop.put(routes=rules, embed="", default="little")).status_code == 200
    other = {"name": "big", "kind": "python", "code": "0" * 64, "entry": "m:f"}
    async with worker(broker, "little", say):
        for put in (None, other, {**router_record("little"), "name": "big"}):
            await cluster.delete_function("big")
            if put:
                await cluster.put_function("big", FunctionSpec.from_dict(put).to_dict())
            await asyncio.sleep(FRESH_S)
            assert await shop.route("explain") == "little; reason=rule; instead-of=big; because=missing"
            assert await shop.route("hello") == "little; reason=default"
            called = await shop.http.put(f"/v1/functions/front/jobs/{uuid.uuid4().hex}", json={"prompt": "explain"})
            assert (await shop.http.get(f"/v1/jobs/{called.json()['id']}")).json()["function"] == "little"
    await cluster.delete_function("little")
    await asyncio.sleep(FRESH_S)
    refused = await shop.ask("hello")
    assert (refused.status_code, error_of(refused)["code"]) == (404, "model_not_found")
    assert "no model left: 'big' and 'little' must be" in error_of(refused)["message"]


def router_record(target: str) -> dict[str, Any]:
    return {"kind": "router", "router": {"routes": [{"target": target, "tools": True}], "default": target}}


@pytest.mark.parametrize(
    ("router", "complaint"),
    [
        ({"default": "nowhere"}, "names 'nowhere', which is not deployed"),
        ({"default": "meaning"}, "needs a language model where it names 'meaning'"),
        ({"embed": "little"}, "needs an embedding model where it names 'little'"),
        ({"default": "front"}, "needs a language model where it names 'front'"),
        ({"routes": [{"target": "big"}]}, "needs a condition or examples"),
        ({"routes": [{"target": "big", "pattern": "("}]}, "can't be used"),
        ({"fallbacks": {"big": 3}}, "valid string"),
    ],
)
async def test_a_router_that_can_not_work_is_refused(shop: Shop, router: dict[str, Any], complaint: str) -> None:
    response = await shop.put(**router)
    assert response.status_code == 400 and complaint in error_of(response)["message"], response.text
    assert (await shop.http.get("/v1/functions/front")).status_code == 404


async def test_what_a_router_names_is_not_removed(awake: Shop) -> None:
    """Neither alone nor by another version of its app; only together with the router."""
    http, rules = awake.http, [{"target": "little", "tools": True}]
    other = {"spec": {"kind": "router", "router": {"routes": rules, "default": "little"}}}
    assert (await http.put("/v1/functions/other", json=other)).status_code == 201
    for name in ("big", "little", "meaning"):
        refused = await http.delete(f"/v1/functions/{name}")
        assert (refused.status_code, error_of(refused)["code"]) == (409, "function_in_use")
        assert f"Router 'front' names function '{name}'" in error_of(refused)["message"]
    alone = {"functions": [{"name": "solo", "kind": "llm", "weights": awake.models["llm"]}]}
    refused = await http.put("/v1/apps/shop", json=alone)
    assert (refused.status_code, error_of(refused)["code"]) == (409, "function_in_use")
    assert "Router 'other' names function 'little'" in error_of(refused)["message"]
    assert (await http.get("/v1/functions/big")).status_code == 200, "nothing of it was done"
    assert (await http.delete("/v1/functions/other")).status_code == 200
    gone = await http.put("/v1/apps/shop", json=alone)
    assert gone.json()["deleted"] == ["big", "front", "little", "meaning"], "they go with their router"
    assert (await http.delete("/v1/functions/solo")).status_code == 200


async def test_a_router_takes_conversations_only(awake: Shop) -> None:
    response = await awake.http.post("/v1/embeddings", json={"model": "front", "input": "x"})
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")
    assert "front" in [model["id"] for model in (await awake.http.get("/v1/models")).json()["data"]]


async def test_a_shared_router_means_the_operators_models_and_bills_its_caller(
    root: httpx.AsyncClient, login: Login, broker: Broker, smollm2_store_url: str, minilm_store_url: str
) -> None:
    """A tenant's own function with a target's name is not what the operator's router means."""
    shop = Shop(root, {"llm": smollm2_store_url, "embed": minilm_store_url})
    acme = login((await make_key(root, "acme", "invoke", "deploy"))["key"])
    try:
        rules = [{"target": "little", "keywords": ["order"]}]
        assert (await shop.put(routes=rules, embed="")).status_code == 200
        own = {"spec": {"name": "little", "kind": "llm", "weights": smollm2_store_url}}
        assert (await acme.put("/v1/functions/little", json=own)).status_code == 201
        async with worker(broker, "little", say):
            answer = await Shop(acme, {}).ask("where is my order")
        job = (await acme.get(f"/v1/jobs/{answer.headers['x-job-id']}")).json()
        assert answer.json()["choices"][0]["message"]["content"] == "little"
        assert job["usage"]["tenant"] == "acme" and job["route"]["target"] == "little"
    finally:
        await acme.delete("/v1/functions/little")
        await shop.delete()
