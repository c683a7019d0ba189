"""The routes that OpenAI's own client uses, through that client wherever it can say what is tested."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from stoker.queue.broker import Broker
from stoker.queue.records import Enqueued, Limits, NewJob, QueueFull

from .conftest import KEEPALIVE_S, RunningGateway
from .peers import PATIENCE_S, Task, error_of, server_events, worker

pytestmark = pytest.mark.real_model

MESSAGES: Any = [{"role": "user", "content": "Say Hello, wörld!"}]
TEXT = "Hello, wörld! \U0001f600"
PIECES = ["Hello", "", ", w", "örld! \U0001f600"]


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0, timeout=20) as client:
        yield client


def usage(task: Task) -> dict[str, int]:
    return {"prompt_tokens": len(task.payload["prompt_ids"]), "completion_tokens": 4, "cached_tokens": 2}


async def say_hello(task: Task) -> None:
    """Emits token by token when the job streams, as the engine's worker does."""
    if task.claim.stream:
        for number, piece in enumerate(PIECES):
            await task.emit({"text": piece, "ids": [number]})
    await task.done({"text": TEXT, "finish_reason": "stop", "usage": usage(task)}, **usage(task))


async def test_chat(client: openai.AsyncOpenAI, broker: Broker, chat_model: str) -> None:
    async with worker(broker, chat_model, say_hello):
        answer = await client.chat.completions.create(model=chat_model, messages=MESSAGES)
    choice = answer.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (TEXT, "assistant", "stop")
    assert answer.object == "chat.completion" and answer.model == chat_model
    assert answer.usage and answer.usage.prompt_tokens_details
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 4
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer._request_id


async def test_streamed_chat_equals_whole_chat(client: openai.AsyncOpenAI, broker: Broker, chat_model: str) -> None:
    async with worker(broker, chat_model, say_hello):
        stream = await client.chat.completions.create(
            model=chat_model, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        whole = await client.chat.completions.create(model=chat_model, messages=MESSAGES)
    *talking, last, counted = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in talking) == whole.choices[0].message.content
    assert talking[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in [*talking, last]] == [None] * len(talking) + ["stop"]
    assert counted.choices == [] and counted.usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in [*talking, last])


async def test_streamed_bytes(http: httpx.AsyncClient, broker: Broker, chat_model: str) -> None:
    body = {"model": chat_model, "messages": MESSAGES, "stream": True}
    async with worker(broker, chat_model, say_hello):
        response = await http.post("/v1/chat/completions", json=body)
        events = [event async for event in server_events(response)]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-job-id"].startswith(chat_model)
    assert (response.headers["cache-control"], response.headers["x-accel-buffering"]) == ("no-cache", "no")
    assert events[-1].data == "[DONE]"
    assert "usage" not in json.loads(events[0].data)
    assert [bool(event.id) for event in events] == [False, True, True, True, False, False]


async def test_a_lost_piece_is_made_up_for_by_the_result(
    client: openai.AsyncOpenAI, broker: Broker, chat_model: str
) -> None:
    async def terse(task: Task) -> None:
        await task.emit({"text": "Hello", "ids": [1]})
        await task.done({"text": TEXT, "finish_reason": "length", "usage": usage(task)})

    async with worker(broker, chat_model, terse):
        stream = await client.chat.completions.create(model=chat_model, messages=MESSAGES, stream=True)
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_an_empty_answer_still_has_a_role_and_a_reason(
    client: openai.AsyncOpenAI, broker: Broker, chat_model: str
) -> None:
    async def silent(task: Task) -> None:
        await task.done({"text": "", "finish_reason": "stop", "usage": usage(task)})

    async with worker(broker, chat_model, silent):
        stream = await client.chat.completions.create(model=chat_model, messages=MESSAGES, stream=True)
        first, last = [chunk async for chunk in stream]
    assert (first.choices[0].delta.role, last.choices[0].finish_reason) == ("assistant", "stop")


async def test_a_second_attempt_continues_the_stream(
    client: openai.AsyncOpenAI, broker: Broker, chat_model: str
) -> None:
    seeds: list[int] = []

    async def dies_once(task: Task) -> None:
        seeds.append(task.payload["params"]["seed"])
        if task.claim.attempt == 1:
            await task.emit({"text": "Hello", "ids": [1]})
            await task.fail({"type": "internal_error", "message": "lost"}, retry=True)
        else:
            await task.emit({"text": TEXT[5:], "ids": [2]})
            await task.done({"text": TEXT, "finish_reason": "stop", "usage": usage(task)})

    async with worker(broker, chat_model, dies_once):
        stream = await client.chat.completions.create(model=chat_model, messages=MESSAGES, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == TEXT
    assert len(seeds) == 2 and seeds[0] == seeds[1]


async def test_what_the_worker_gets(
    client: openai.AsyncOpenAI, broker: Broker, chat_model: str, smollm2_dir: Any
) -> None:
    seen: list[Any] = []

    async def note(task: Task) -> None:
        seen.append(task.payload)
        await say_hello(task)

    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    async with worker(broker, chat_model, note):
        await client.chat.completions.create(
            model=chat_model, messages=MESSAGES, temperature=0, max_completion_tokens=7, stop=["\n"], seed=5, user="u"
        )
        await client.completions.create(model=chat_model, prompt="Once upon")
        await client.completions.create(model=chat_model, prompt=[1, 2, 3], max_tokens=9)
    chat, text, ids = seen
    prompt = tokenizer.decode(chat["prompt_ids"], skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>user\nSay Hello, wörld!<|im_end|>\n<|im_start|>assistant\n")
    assert chat["kind"] == "generate"
    assert chat["params"] == {
        "max_tokens": 7,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": 5,
        "stop": ["\n"],
        "stop_token_ids": [2],
        "ignore_eos": False,
        "include_stop": False,
    }
    assert text["prompt_ids"] == tokenizer.encode("Once upon").ids
    assert text["params"]["max_tokens"] == 8192 - len(text["prompt_ids"])
    assert (ids["prompt_ids"], ids["params"]["max_tokens"]) == ([1, 2, 3], 9)


async def test_completions(client: openai.AsyncOpenAI, broker: Broker, chat_model: str) -> None:
    async with worker(broker, chat_model, say_hello):
        whole = await client.completions.create(model=chat_model, prompt="Once")
        stream = await client.completions.create(
            model=chat_model, prompt="Once", stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (TEXT, "stop")
    *talking, counted = chunks
    assert "".join(chunk.choices[0].text for chunk in talking) == TEXT
    assert talking[-1].choices[0].finish_reason == "stop"
    assert counted.usage == whole.usage


async def test_models(client: openai.AsyncOpenAI, http: httpx.AsyncClient, chat_model: str) -> None:
    assert chat_model in [model.id async for model in client.models.list()]
    assert (await client.models.retrieve(chat_model)).id == chat_model
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("nothing")
    assert caught.value.code == "model_not_found"
    assert (await http.get("/v1/models")).json()["object"] == "list"


async def test_the_clients_error_classes(client: openai.AsyncOpenAI, broker: Broker, chat_model: str) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        await create(model="nothing", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        await create(model=chat_model, messages=MESSAGES, n=99)
    assert (bad.value.code, bad.value.param) == (None, "n")
    with pytest.raises(openai.BadRequestError) as overflow:
        await create(model=chat_model, messages=MESSAGES, max_tokens=9000)
    assert overflow.value.code == "context_length_exceeded"
    assert "8192 tokens" in overflow.value.message and "9000 for the completion" in overflow.value.message
    await broker.set_limits(chat_model, Limits(max_queued=1))
    waiting = asyncio.create_task(create(model=chat_model, messages=MESSAGES))
    async with asyncio.timeout(PATIENCE_S):
        while not (await broker.backlogs([chat_model]))[chat_model].queued:
            await asyncio.sleep(0.01)
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as full:
            await create(model=chat_model, messages=MESSAGES, stream=stream)
        assert full.value.code == "rate_limit_exceeded"
        assert int(full.value.response.headers["retry-after"]) >= 1
    waiting.cancel()


async def test_an_answer_that_fails_is_an_error_of_the_client(
    client: openai.AsyncOpenAI, broker: Broker, chat_model: str
) -> None:
    async def fails(task: Task) -> None:
        if task.payload["params"]["seed"]:
            await task.emit({"text": "Hel", "ids": [1]})
        await task.fail({"type": "model_error", "message": "not a number in the logits"})

    async with worker(broker, chat_model, fails):
        with pytest.raises(openai.InternalServerError, match="not a number"):
            await client.chat.completions.create(model=chat_model, messages=MESSAGES, seed=0)
        with pytest.raises(openai.InternalServerError, match="not a number"):
            await client.chat.completions.create(model=chat_model, messages=MESSAGES, seed=0, stream=True)
        stream = await client.chat.completions.create(model=chat_model, messages=MESSAGES, seed=1, stream=True)
        text = ""
        with pytest.raises(openai.APIError, match="not a number"):
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
    assert text == "Hel"


async def test_comments_keep_a_silent_stream_alive_and_say_why(
    http: httpx.AsyncClient, broker: Broker, chat_model: str
) -> None:
    body = {"model": chat_model, "messages": MESSAGES, "stream": True}
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        events = server_events(response)
        first, second = await anext(events), await anext(events)
        async with worker(broker, chat_model, say_hello):
            rest = [event async for event in events]
    assert (first.comment, second.comment) == ("no host available", "no host available")
    assert rest[-1].data == "[DONE]"


async def test_a_stream_begins_when_its_job_is_queued_however_long_that_takes(
    http: httpx.AsyncClient, broker: Broker, chat_model: str, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, full = gateway.inside.broker, [False, True]
    enqueue = queue.enqueue

    async def slowly(job: NewJob) -> Enqueued:
        await asyncio.sleep(3 * KEEPALIVE_S)
        if full.pop(0):
            raise QueueFull("full", limit="jobs", retry_after_s=7)
        return await enqueue(job)

    monkeypatch.setattr(queue, "enqueue", slowly)
    body = {"model": chat_model, "messages": MESSAGES, "stream": True}
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert (await anext(server_events(response))).comment == "no host available"
    assert response.headers["x-job-id"].startswith(chat_model)
    refused = await http.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "7")


async def test_a_stream_is_replayed_under_its_idempotency_key(
    http: httpx.AsyncClient, broker: Broker, chat_model: str
) -> None:
    body = {"model": chat_model, "messages": MESSAGES, "stream": True}
    headers = {"idempotency-key": "stream-1"}
    async with worker(broker, chat_model, say_hello):
        first = await http.post("/v1/chat/completions", json=body, headers=headers)
        again = await http.post("/v1/chat/completions", json=body, headers=headers)
    assert again.headers["idempotency-replayed"] == "true"
    assert again.headers["x-job-id"] == first.headers["x-job-id"]

    def texts(response: httpx.Response) -> list[Any]:
        lines = [line[6:] for line in response.text.split("\n") if line.startswith("data: {")]
        return [json.loads(line)["choices"] for line in lines]

    assert texts(again) == texts(first)


async def test_language_models_as_functions_and_jobs(http: httpx.AsyncClient, broker: Broker, chat_model: str) -> None:
    async with worker(broker, chat_model, say_hello):
        called = await http.post(f"/v1/functions/{chat_model}", json={"messages": MESSAGES, "stream": True})
        job = (await http.post(f"/v1/functions/{chat_model}/jobs", json={"prompt": "Once"})).json()
        events = [event async for event in server_events(await http.get(job["links"]["events"])) if not event.comment]
    assert called.json()["choices"][0]["message"]["content"] == TEXT
    assert "".join(json.loads(event.data)["text"] for event in events[1:-1]) == TEXT
    assert json.loads(events[-1].data)["result"]["finish_reason"] == "stop"
    neither = await http.post(f"/v1/functions/{chat_model}", json={"input": 1})
    assert (neither.status_code, error_of(neither)["param"]) == (400, "messages")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_refusals_have_one_shape(http: httpx.AsyncClient, chat_model: str, path: str) -> None:
    bodies: list[Any] = [b"{", b"[]", b"null", b"", b'{"model": 5}', b'{"model": "nothing", "prompt": "a"}']
    for body in bodies:
        response = await http.post(path, content=body)
        assert response.status_code in (400, 404)
        assert error_of(response)["type"] == "invalid_request_error"
    good = {"model": chat_model, "messages": MESSAGES, "prompt": "a"}
    for field in ({"prompt": [99999999]}, {"prompt": []}, {"prompt": [-1]}):
        response = await http.post("/v1/completions", json={**good, **field})
        assert (response.status_code, error_of(response)["param"]) == (400, "prompt")


async def test_a_python_function_is_no_language_model(http: httpx.AsyncClient, deploy: Any) -> None:
    name = await deploy()
    response = await http.post("/v1/chat/completions", json={"model": name, "messages": MESSAGES})
    assert (response.status_code, error_of(response)["param"]) == (404, "model")
    assert (await http.get(f"/v1/models/{name}")).status_code == 404
