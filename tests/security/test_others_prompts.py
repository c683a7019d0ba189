"""Row 13 at the gateway: neither a tenant's chat template nor prompts that will be refused hold up another's chat."""

import asyncio
import itertools
import json
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from stoker.coldstart.publish import publish
from stoker.coldstart.store import open_store
from stoker.queue.broker import Broker
from stoker.queue.cluster import Cluster
from stoker.runtime.gateway.settings import GatewaySettings
from stoker.runtime.spec import FunctionSpec
from tests.runtime.gateway.conftest import SECRET, Login, RunningGateway, running
from tests.runtime.gateway.peers import Task, make_key, worker

MOST_S, FLOOD = 8.0, 8
WORDS = "a b " * 100_000
HOSTILE = "{{ (7 ** (messages|length * 12000000)) % 10 }}"
numbers = itertools.count()


@pytest.fixture(scope="module")
def keyed(settings: GatewaySettings) -> Iterator[RunningGateway]:
    wide = replace(settings, keys_secret=SECRET, secret=SECRET, gateway_id="gateway-wide", max_body_bytes=10 << 20)
    with running(replace(wide, body_timeout_s=30.0)) as gateway:
        yield gateway


@pytest.fixture
async def shared(cluster: Cluster, broker: Broker, tiny_store_url: str) -> AsyncIterator[str]:
    """The operator's model, with a worker that answers."""
    name = f"shared_{next(numbers)}"
    spec = FunctionSpec(name=name, kind="llm", weights=tiny_store_url, version="1")
    await cluster.put_function(name, spec.to_dict())
    async with worker(broker, name, answer):
        yield name
    await cluster.delete_function(name)


async def answer(task: Task) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    await task.done({"text": "x", "finish_reason": "stop", "usage": usage}, busy_ms=1.0, **usage)


async def tenant(root: httpx.AsyncClient, login: Login, name: str) -> httpx.AsyncClient:
    client = login((await make_key(root, name, "invoke", "deploy"))["key"])
    client.timeout = httpx.Timeout(300)
    return client


def chat(model: str, text: str = "hello") -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4}


async def slowest(client: httpx.AsyncClient, model: str, attack: list[asyncio.Task[httpx.Response]]) -> float:
    """Of chats one after the other for as long as the attack goes on."""
    await client.post("/v1/chat/completions", json=chat(model))
    times = [0.0]
    while not all(each.done() for each in attack) or len(times) < 5:
        began = time.monotonic()
        response = await client.post("/v1/chat/completions", json=chat(model))
        assert response.status_code == 200, response.text
        times.append(time.monotonic() - began)
        await asyncio.sleep(0.05)
    return max(times)


def sent(client: httpx.AsyncClient, body: dict[str, Any], times: int) -> list[asyncio.Task[httpx.Response]]:
    return [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for _ in range(times)]


async def test_prompts_that_will_be_refused_hold_up_nobody_else(
    root: httpx.AsyncClient, login: Login, shared: str
) -> None:
    loud, quiet = await tenant(root, login, "loud"), await tenant(root, login, "quiet")
    attack = sent(loud, chat(shared, WORDS), FLOOD)
    assert await slowest(quiet, shared, attack) < MOST_S
    refusals = await asyncio.gather(*attack)
    assert {each.json()["error"]["code"] for each in refusals} == {"context_length_exceeded"}


async def test_a_tenants_hostile_template_holds_up_nobody_else(
    root: httpx.AsyncClient, login: Login, shared: str, tiny_store_url: str, tmp_path: Path
) -> None:
    loud, quiet = await tenant(root, login, "loud"), await tenant(root, login, "quiet")
    weights = with_template(tiny_store_url, tmp_path, HOSTILE)
    deployed = await loud.put("/v1/functions/own", json={"spec": {"kind": "llm", "weights": weights}})
    assert deployed.status_code in (200, 201), deployed.text
    attack = sent(loud, chat("own"), 2)
    assert await slowest(quiet, shared, attack) < MOST_S
    for refused in await asyncio.gather(*attack):
        assert refused.status_code == 400 and "longer than 2 s" in refused.json()["error"]["message"]


def with_template(store_url: str, folder: Path, template: str) -> str:
    """A copy of the model with another chat template."""
    model = folder / "model"
    shutil.copytree(store_url.removeprefix("file://"), model)
    (model / "manifest.msgpack").unlink()
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    publish(model, open_store((folder / "store").as_uri()))
    return (folder / "store").as_uri()
