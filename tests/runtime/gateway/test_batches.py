"""Batches with the official client; the language model behind them is a peer that answers from the real queue."""

import asyncio
import json
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from redis.asyncio import Redis

from stoker.coldstart.store import ObjectStore
from stoker.queue.broker import Broker
from stoker.queue.records import NewJob, new_job_id
from stoker.runtime.batches.batch import new_batch
from stoker.runtime.batches.batch_lines import LineResult
from stoker.runtime.batches.batch_shelf import BatchShelf, lease_key
from stoker.runtime.batches.file_shelf import result_key
from stoker.runtime.gateway import batch_runner
from stoker.runtime.gateway.batch_kinds import KINDS
from stoker.runtime.gateway.batch_line import line_key

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


def counts_of(batch: Any) -> tuple[int, int]:
    """Of lines that completed, and of those that failed."""
    return (batch.request_counts.completed, batch.request_counts.failed) if batch.request_counts else (0, 0)


async def until_over(
    client: openai.AsyncOpenAI, batch_id: str, within_s: float = 60, look: Callable[[Any], None] = lambda batch: None
) -> Any:
    deadline = time.monotonic() + within_s
    while True:
        batch = await client.batches.retrieve(batch_id)
        look(batch)
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
    login: Login, root: httpx.AsyncClient, chat_model: str, broker: Broker, redis: Redis, store: ObjectStore
) -> None:
    ann = login((await make_key(root, "ann", "invoke"))["key"])
    text = "\n".join(line(chat_model, number) for number in range(3)).encode()
    made = (await ann.post("/v1/files", data={"purpose": "batch"}, files={"file": ("f", text)})).json()["id"]
    batch_id = (await ann.post("/v1/batches", json={"endpoint": URL, "input_file_id": made})).json()["id"]
    while (await broker.backlogs([chat_model]))[chat_model].queued < 3:
        await asyncio.sleep(0.02)
    await root.delete("/v1/tenants/ann")
    deadline, shelf = time.monotonic() + 5, BatchShelf(redis)
    while (await broker.backlogs([chat_model]))[chat_model].queued or await redis.exists(lease_key(batch_id)):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    assert await shelf.get("ann", batch_id) is None and ("ann", batch_id) not in await shelf.active()
    assert list(store.list("batches/ann/")) == list(store.list("files/ann/")) == []


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


@pytest.mark.parametrize("lines", [["", ""], ["\ufeff"], ["\ufeff ", ""]])
async def test_an_empty_file_fails_the_batch(client: openai.AsyncOpenAI, lines: list[str]) -> None:
    batch = await until_over(client, (await start(client, lines)).id)
    assert batch.status == "failed" and batch.errors.data[0].code == "invalid_line_count"
    assert batch.output_file_id is None and batch.failed_at


async def test_the_input_of_a_batch_that_is_not_over_is_kept(client: openai.AsyncOpenAI, chat_model: str) -> None:
    batch = await start(client, [line(chat_model, 1)])
    with pytest.raises(openai.ConflictError, match=batch.id):
        await client.files.delete(batch.input_file_id)
    await client.batches.cancel(batch.id)
    await until_over(client, batch.id)
    assert (await client.files.delete(batch.input_file_id)).deleted


@pytest.mark.parametrize(("status", "end"), [("in_progress", "failed"), ("cancelling", "cancelled")])
async def test_what_is_stored_outlives_the_input(
    client: openai.AsyncOpenAI, chat_model: str, broker: Broker, store: ObjectStore, redis: Redis, status: Any, end: str
) -> None:
    """A batch as a gateway leaves it that dies in the second stretch, whose input is gone when another takes over:
    results that were stored are in the files, and the lines that wait in the queue are not run for nobody."""
    begun = replace(new_batch("default", URL, "file-gone", {}), status=status, total=700, in_progress_at=1)
    batch = replace(begun, segments_done=1, completed=499, failed=1)
    for good, text in ((True, b'{"custom_id": "good"}\n'), (False, b'{"custom_id": "bad"}\n')):
        store.write(result_key("default", batch.id, 0, good), text)
    for number in (500, 699):
        job = NewJob(id=new_job_id(chat_model), function=chat_model, tenant="default", payload=b"")
        await broker.enqueue(replace(job, idempotency_key=line_key(batch, number)))
    await broker.claim(chat_model, "worker", 1)
    await BatchShelf(redis).add(batch)
    over = await until_over(client, batch.id)
    assert (over.status, over.errors.data[0].code) == (end, "input_file_not_found")
    counts = over.request_counts
    assert (counts.total, counts.completed, counts.failed) == (700, 499, 1)
    assert [row["custom_id"] for row in await rows(client, over.output_file_id)] == ["good"]
    assert [row["custom_id"] for row in await rows(client, over.error_file_id)] == ["bad"]
    backlog = (await broker.backlogs([chat_model]))[chat_model]
    assert backlog.queued == backlog.running == 0


async def test_a_batch_that_only_lacks_its_files_needs_no_input(
    client: openai.AsyncOpenAI, store: ObjectStore, redis: Redis
) -> None:
    begun = replace(new_batch("default", URL, "file-gone", {}), status="finalizing", total=1, finalizing_at=1)
    batch = replace(begun, segments_done=1, completed=1)
    for good, text in ((True, b'{"custom_id": "good"}\n'), (False, b"")):
        store.write(result_key("default", batch.id, 0, good), text)
    await BatchShelf(redis).add(batch)
    over = await until_over(client, batch.id)
    assert (over.status, over.errors, len(await rows(client, over.output_file_id))) == ("completed", None, 1)


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
    behind = (await ann.get("/v1/batches", params={"after": ids[1] + "0"})).json()
    assert [row["id"] for row in behind["data"]] == ids[1::-1]
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


@pytest.mark.parametrize(("count", "length"), [(50_000, 300), (300, 1 << 20)], ids=["many lines", "long lines"])
async def test_what_is_in_memory_does_not_grow_with_the_batch(count: int, length: int) -> None:
    """Lines are read as they are begun, and their results wait for no more than the first of those."""
    begun, most = 0, 0

    class Runner:
        async def result(self, number: int, text: bytes) -> LineResult:
            nonlocal begun
            begun += 1
            if number % 100 == 0:
                await asyncio.sleep(0.001)
            return LineResult(True, False, text)

    lines = ((number, b"x" * length) for number in range(count))
    seen = 0
    tracemalloc.start()
    async for result in batch_runner.in_order(Runner(), lines):  # type: ignore[arg-type]
        assert len(result.text) == length
        seen += 1
        most = max(most, begun - seen)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seen == count and most <= batch_runner.BEGUN
    assert peak < batch_runner.BEGUN_BYTES + (16 << 20)


async def test_more_lines_than_a_stretch(client: openai.AsyncOpenAI, chat_model: str, broker: Broker) -> None:
    async with worker(broker, chat_model, count_prompt):
        batch = await until_over(client, (await start(client, [line(chat_model, n) for n in range(600)])).id, 30)
    assert [row["custom_id"] for row in await rows(client, batch.output_file_id)] == [f"line-{n}" for n in range(600)]
