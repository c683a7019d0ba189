"""Batches with the official client; the language model behind them is a peer that answers from the real queue."""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from redis.asyncio import Redis

from stoker.queue.broker import Broker
from stoker.runtime.batches.batch_shelf import BatchShelf
from stoker.runtime.gateway import batch_runner
from stoker.runtime.gateway.batch_kinds import KINDS
from stoker.runtime.gateway.settings import GatewaySettings

from .conftest import BODY_LIMIT, Login, RunningGateway
from .peers import Task, error_of, make_key, worker

URL = "/v1/chat/completions"
CHAT = KINDS[URL]


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0, timeout=20) as client:
        yield client


def line(model: str, number: int, **fields: Any) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": str(number)}], "max_tokens": 5}
    return json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": URL, "body": body, **fields})


async def count_prompt(task: Task) -> None:
    usage = {"prompt_tokens": len(task.payload["prompt_ids"]), "completion_tokens": 1, "cached_tokens": 0}
    await task.done({"text": f"{len(task.payload['prompt_ids'])}", "finish_reason": "stop", "usage": usage}, **usage)


async def start(client: openai.AsyncOpenAI, lines: list[str], **fields: Any) -> Any:
    made = await client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    return await client.batches.create(input_file_id=made.id, endpoint=URL, completion_window="24h", **fields)


async def until_over(client: openai.AsyncOpenAI, batch_id: str, within_s: float = 60) -> Any:
    deadline = time.monotonic() + within_s
    while True:
        batch = await client.batches.retrieve(batch_id)
        if batch.status in ("completed", "failed", "cancelled", "expired"):
            return batch
        assert time.monotonic() < deadline, batch
        await asyncio.sleep(0.05)


async def rows(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (await client.files.content(file_id)).text.splitlines()] if file_id else []


async def test_good_and_bad_lines_end_in_their_files(
    client: openai.AsyncOpenAI, chat_model: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "SEGMENT_LINES", 7)
    lines = [line(chat_model, number) for number in range(40)]
    lines[3] = "{"
    lines[11] = line(chat_model, 11, method="GET")
    lines[17] = line("nobody", 17)
    lines[23] = line(chat_model, 22)
    lines[31] = line(chat_model, 31, body={"model": chat_model, "messages": [], "max_tokens": 5})
    lines.insert(20, "")
    async with worker(broker, chat_model, count_prompt):
        batch = await start(client, lines, metadata={"why": "test"})
        assert (batch.status, batch.metadata, batch.completion_window) == ("validating", {"why": "test"}, "24h")
        batch = await until_over(client, batch.id)
    assert (batch.status, batch.request_counts.total) == ("completed", 40)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (35, 5)
    good, bad = await rows(client, batch.output_file_id), await rows(client, batch.error_file_id)
    wanted = [number for number in range(40) if number not in (3, 11, 17, 23, 31)]
    assert [row["custom_id"] for row in good] == [f"line-{number}" for number in wanted]
    for row in good:
        body = row["response"]["body"]
        assert (row["error"], row["response"]["status_code"], body["object"]) == (None, 200, "chat.completion")
        assert body["choices"][0]["message"]["content"] == str(body["usage"]["prompt_tokens"])
    assert [row["custom_id"] for row in bad] == [None, "line-11", "line-17", "line-22", "line-31"]
    codes = [(row["error"] or row["response"]["body"]["error"])["code"] for row in bad]
    assert codes[:4] == ["invalid_json_line", "invalid_method", "model_not_found", "duplicate_custom_id"]
    assert bad[4]["response"]["status_code"] == 400


async def test_a_line_that_breaks_something_ends_in_the_error_file(
    client: openai.AsyncOpenAI, chat_model: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that nobody thought of, and one that is longer than a request may be: the others are run."""

    def answer(request: Any, job_id: str, result: Any) -> Any:
        if request.messages[0].content == "2":
            raise TypeError("nobody thought of this")
        return CHAT.answer(request, job_id, result)

    monkeypatch.setitem(KINDS, URL, replace(CHAT, answer=answer))
    lines = [line(chat_model, 0), "[" * 100_000, line(chat_model, 2), line(chat_model, 3, why="x" * BODY_LIMIT)]
    async with worker(broker, chat_model, count_prompt):
        batch = await until_over(client, (await start(client, [*lines, line(chat_model, 4)])).id, 10)
    assert [row["custom_id"] for row in await rows(client, batch.output_file_id)] == ["line-0", "line-4"]
    bad = await rows(client, batch.error_file_id)
    codes = [(row["error"] or row["response"]["body"]["error"])["code"] for row in bad]
    assert codes == ["invalid_json_line", "internal_error", "request_too_large"]


async def test_the_batch_of_a_deleted_tenant_ends(
    login: Login, root: httpx.AsyncClient, chat_model: str, broker: Broker, redis: Redis
) -> None:
    ann = login((await make_key(root, "ann", "invoke"))["key"])
    text = "\n".join(line(chat_model, number) for number in range(3)).encode()
    made = (await ann.post("/v1/files", data={"purpose": "batch"}, files={"file": ("f", text)})).json()["id"]
    batch_id = (await ann.post("/v1/batches", json={"endpoint": URL, "input_file_id": made})).json()["id"]
    while (await broker.backlogs([chat_model]))[chat_model].queued < 3:
        await asyncio.sleep(0.02)
    await root.delete("/v1/tenants/ann")
    deadline = time.monotonic() + 5
    while not (found := await BatchShelf(redis).get("ann", batch_id)) or not found.over:
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.05)
    assert (found.status, found.stopped, found.failed) == ("completed", "batch_cancelled", 0)
    assert (await broker.backlogs([chat_model]))[chat_model].queued == 0


async def test_a_tenant_with_many_batches_leaves_room_for_others(
    login: Login, root: httpx.AsyncClient, chat_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own wait for each other. At most two gateways of this session drive them, one each."""
    monkeypatch.setattr(batch_runner, "MOST_OF_A_TENANT", 1)
    made: dict[str, list[str]] = {}
    tenants = {name: login((await make_key(root, name, "invoke"))["key"]) for name in ("crowd", "guest")}
    for (name, tenant), count in zip(tenants.items(), (5, 1), strict=True):
        form = {"file": ("f", line(chat_model, 1).encode())}
        file_id = (await tenant.post("/v1/files", data={"purpose": "batch"}, files=form)).json()["id"]
        body = {"endpoint": URL, "input_file_id": file_id}
        made[name] = [(await tenant.post("/v1/batches", json=body)).json()["id"] for _ in range(count)]

    async def states(name: str) -> Counter[str]:
        return Counter(row["status"] for row in (await tenants[name].get("/v1/batches")).json()["data"])

    while (await states("guest"))["in_progress"] < 1:
        await asyncio.sleep(0.05)
    assert (await states("crowd"))["validating"] >= 3
    for name, ids in made.items():
        for batch_id in ids:
            await tenants[name].post(f"/v1/batches/{batch_id}/cancel")
    monkeypatch.undo()
    while (await states("crowd"))["cancelled"] < 5:
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("name", ["active", "lease", "of"])
async def test_a_tenant_may_have_any_name(login: Login, root: httpx.AsyncClient, name: str) -> None:
    tenant = login((await make_key(root, name, "invoke"))["key"])
    made = (await tenant.post("/v1/files", data={"purpose": "batch"}, files={"file": ("f", b"{")})).json()["id"]
    batch_id = (await tenant.post("/v1/batches", json={"endpoint": URL, "input_file_id": made})).json()["id"]
    assert [row["id"] for row in (await tenant.get("/v1/batches")).json()["data"]] == [batch_id]
    while (await tenant.get(f"/v1/batches/{batch_id}")).json()["status"] != "completed":
        await asyncio.sleep(0.02)


async def test_an_empty_file_fails_the_batch(client: openai.AsyncOpenAI) -> None:
    batch = await until_over(client, (await start(client, ["", ""])).id)
    assert batch.status == "failed" and batch.errors.data[0].code == "invalid_line_count"
    assert batch.output_file_id is None and batch.failed_at


async def test_a_cancelled_batch_keeps_what_was_done(
    client: openai.AsyncOpenAI, chat_model: str, broker: Broker
) -> None:
    """The worker answers ten lines and then no more."""
    answered = 0

    async def tired(task: Task) -> None:
        nonlocal answered
        answered += 1
        if answered <= 10:
            await count_prompt(task)

    async with worker(broker, chat_model, tired):
        batch = await start(client, [line(chat_model, number) for number in range(30)])
        while answered < 11:
            await asyncio.sleep(0.02)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await until_over(client, batch.id)
    assert (batch.status, batch.request_counts.total) == ("cancelled", 30)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (10, 0)
    assert batch.cancelling_at and batch.cancelled_at
    assert len(await rows(client, batch.output_file_id)) == 10
    assert {row["error"]["code"] for row in await rows(client, batch.error_file_id)} == {"batch_cancelled"}
    with pytest.raises(openai.ConflictError):
        await client.batches.cancel((await until_over(client, (await start(client, [""])).id)).id)


async def test_a_batch_whose_window_is_over_expires(
    client: openai.AsyncOpenAI, chat_model: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.runtime.batches.batch.WINDOW_S", 1)
    batch = await until_over(client, (await start(client, [line(chat_model, 1)])).id)
    assert (batch.status, batch.request_counts.failed) == ("expired", 0) and batch.expired_at
    assert [row["error"]["code"] for row in await rows(client, batch.error_file_id)] == ["batch_expired"]


async def test_the_lease_has_one_holder(redis: Redis) -> None:
    shelf = BatchShelf(redis)
    assert [await shelf.take("batch_x", driver) for driver in ("a", "b", "a")] == [True, False, True]
    await shelf.leave("batch_x", "b")
    assert not await shelf.take("batch_x", "b")
    await shelf.leave("batch_x", "a")
    assert await shelf.take("batch_x", "b")
    await shelf.leave("batch_x", "b")


async def test_batches_are_listed_and_belong_to_their_tenant(login: Login, root: httpx.AsyncClient) -> None:
    ann, bob = [login((await make_key(root, name, "invoke"))["key"]) for name in ("ann", "bob")]
    made = (await ann.post("/v1/files", data={"purpose": "batch"}, files={"file": ("f", b"{")})).json()["id"]
    body = {"input_file_id": made, "endpoint": URL, "completion_window": "24h"}
    assert (await bob.post("/v1/batches", json=body)).status_code == 404
    ids = [(await ann.post("/v1/batches", json=body)).json()["id"] for _ in range(3)]
    page = (await ann.get("/v1/batches", params={"limit": 2})).json()
    assert ([row["id"] for row in page["data"]], page["has_more"]) == (ids[:0:-1], True)
    assert (await bob.get("/v1/batches")).json()["data"] == []
    for method, path in (("GET", ""), ("POST", "/cancel")):
        response = await bob.request(method, f"/v1/batches/{ids[0]}{path}")
        assert (response.status_code, error_of(response)["code"]) == (404, "batch_not_found")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"endpoint": "/v1/other"}, "endpoint"),
        ({"endpoint": URL, "completion_window": "1h"}, "completion_window"),
        ({"endpoint": URL}, "input_file_id"),
        ({"endpoint": URL, "input_file_id": "../x"}, "input_file_id"),
        ({"endpoint": URL, "input_file_id": "file-x"}, "input_file_id"),
        ({"endpoint": [URL]}, "endpoint"),
        ({"endpoint": {}}, "endpoint"),
        ({"endpoint": URL, "input_file_id": "file-" + "x" * 5000}, "input_file_id"),
    ],
    ids=lambda value: str(value)[:90],
)
async def test_bad_batches(http: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    response = await http.post("/v1/batches", json=body)
    assert response.status_code in (400, 404) and error_of(response)["param"] == param


@contextlib.contextmanager
def gateway_process(settings: GatewaySettings, port: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "stoker.runtime.cli", "gateway", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--redis", settings.redis_url, "--store", settings.store_url]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


async def test_a_gateway_that_takes_over_a_batch_runs_no_line_twice(
    settings: GatewaySettings, chat_model: str, broker: Broker, unused_tcp_port: int
) -> None:
    """The first gateway is killed in the middle; every answer is there once, and each prompt was run once."""
    runs: Counter[tuple[int, ...]] = Counter()

    async def slowly(task: Task) -> None:
        runs[tuple(task.payload["prompt_ids"])] += 1
        await asyncio.sleep(0.02)
        await count_prompt(task)

    url, lines = f"http://127.0.0.1:{unused_tcp_port}/v1", [line(chat_model, number) for number in range(300)]
    lines[150] = "{"
    client = openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=30, timeout=20)
    async with client, worker(broker, chat_model, slowly):
        with gateway_process(settings, unused_tcp_port):
            batch = await start(client, lines)
            while sum(runs.values()) < 100:
                await asyncio.sleep(0.01)
        with gateway_process(settings, unused_tcp_port):
            batch = await until_over(client, batch.id)
            good, bad = await rows(client, batch.output_file_id), await rows(client, batch.error_file_id)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 299, 1)
    assert [row["custom_id"] for row in good] == [f"line-{number}" for number in range(300) if number != 150]
    assert len(bad) == 1
    assert len(runs) == 299 and set(runs.values()) == {1}
