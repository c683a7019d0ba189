"""A model's request takes its place in the limits before it is tokenised, and gives it back when it is refused."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from stoker.queue.broker import Broker
from stoker.queue.cluster import Cluster
from stoker.runtime.gateway.prompts import PromptEncoder
from stoker.runtime.spec import FunctionSpec

from .conftest import Login
from .peers import Task, make_key, worker

numbers = itertools.count()
HELLO = [{"role": "user", "content": "hello"}]
TOO_LONG = [{"role": "user", "content": "a " * 3000}]


@pytest.fixture
async def tiny(cluster: Cluster, tiny_store_url: str) -> AsyncIterator[str]:
    name = f"tiny_{next(numbers)}"
    spec = FunctionSpec(name=name, kind="llm", weights=tiny_store_url, version="1")
    await cluster.put_function(name, spec.to_dict())
    yield name
    await cluster.delete_function(name)


async def limited(root: httpx.AsyncClient, login: Login, tenant: str, **limits: float) -> httpx.AsyncClient:
    made = await make_key(root, tenant, "invoke")
    assert (await root.patch(f"/v1/tenants/{tenant}", json={"limits": limits})).status_code == 200
    return login(made["key"])


async def answer(task: Task) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    await task.done({"text": "x", "finish_reason": "stop", "usage": usage}, busy_ms=1.0, **usage)


def requests(tiny: str, content: list[dict[str, str]]) -> list[tuple[str, dict[str, Any]]]:
    text = content[0]["content"]
    chat = {"model": tiny, "messages": content, "max_tokens": 4}
    return [
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "stream": True}),
        ("/v1/completions", {"model": tiny, "prompt": text, "max_tokens": 4}),
        ("/v1/responses", {"model": tiny, "input": text, "max_output_tokens": 16}),
        (f"/v1/functions/{tiny}", {"messages": content, "max_tokens": 4}),
        (f"/v1/functions/{tiny}/jobs", {"messages": content, "max_tokens": 4}),
    ]


async def nothing_taken(redis: Redis, tenant: str) -> None:
    """Releases are sent behind the answer."""
    keys = [f"stoker:t:{{{tenant}}}:m:{what}" for what in ("live", "held", "reserved", "early")]
    async with asyncio.timeout(10):
        while left := [key for key in keys if await redis.exists(key)]:
            await asyncio.sleep(0.02)
            assert all([await redis.pttl(key) != -1 for key in left]), left


async def test_refused_requests_leave_no_place_taken(
    root: httpx.AsyncClient, login: Login, tiny: str, broker: Broker, redis: Redis
) -> None:
    client = await limited(root, login, "clumsy", concurrency=1, budget_usd=1, tokens_per_minute=100_000)
    for path, body in requests(tiny, TOO_LONG):
        refused = await client.post(path, json=body)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded", path
        await nothing_taken(redis, "clumsy")
    async with worker(broker, tiny, answer):
        for path, body in requests(tiny, HELLO)[:-1]:
            for _ in range(2):
                async with asyncio.timeout(10):
                    while (response := await client.post(path, json=body)).status_code == 429:
                        await asyncio.sleep(0.05)
                assert response.status_code == 200, response.text


async def test_an_exhausted_limit_is_told_before_any_work(
    root: httpx.AsyncClient, login: Login, tiny: str, monkeypatch: pytest.MonkeyPatch, redis: Redis
) -> None:
    tokenised: list[int] = []
    ids = PromptEncoder._ids

    def counted(self: PromptEncoder, texts: Any, *, special: bool) -> list[list[int]]:
        tokenised.append(1)
        return ids(self, texts, special=special)

    monkeypatch.setattr(PromptEncoder, "_ids", counted)
    client = await limited(root, login, "hasty", requests_per_minute=1)
    calls = requests(tiny, TOO_LONG)
    answers = [await client.post(path, json=body) for path, body in (calls[0], *calls)]
    assert [each.status_code for each in answers] == [400] + [429] * 6 and len(tokenised) == 1
    assert all(each.headers["retry-after"] for each in answers[1:])
    await nothing_taken(redis, "hasty")


async def test_a_job_counts_once(root: httpx.AsyncClient, login: Login, tiny: str, broker: Broker) -> None:
    client = await limited(root, login, "counted", requests_per_minute=100, tokens_per_minute=1000, concurrency=9)
    async with worker(broker, tiny, answer):
        path, body = requests(tiny, HELLO)[0]
        first = await client.post(path, json=body, headers={"idempotency-key": "k"})
        again = await client.post(path, json=body, headers={"idempotency-key": "k"})
    assert first.headers["x-ratelimit-remaining-requests"] == "99"
    assert int(first.headers["x-ratelimit-remaining-tokens"]) in range(990, 998)
    assert again.status_code == 200 and again.headers["x-job-id"] == first.headers["x-job-id"]


async def test_too_many_tokens_give_the_place_back(
    root: httpx.AsyncClient, login: Login, tiny: str, redis: Redis
) -> None:
    client = await limited(root, login, "wordier", tokens_per_minute=20)
    path, body = requests(tiny, HELLO)[0]
    job = {"messages": HELLO, "max_tokens": 15}
    assert (await client.post(f"/v1/functions/{tiny}/jobs", json=job)).status_code == 202
    assert (await client.post(path, json={**body, "max_tokens": 15})).status_code == 429
    async with asyncio.timeout(10):
        while await redis.zcard("stoker:t:{wordier}:m:live") != 1 or await redis.exists("stoker:t:{wordier}:m:early"):
            await asyncio.sleep(0.02)
