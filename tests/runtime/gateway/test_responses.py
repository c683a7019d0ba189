"""/v1/responses through the official client: whole and streamed, kept and gone on from, with tools and schemas."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import responses
from pydantic import BaseModel
from redis.asyncio import Redis
from tokenizers import Tokenizer

from stoker.queue.broker import Broker
from stoker.runtime.gateway.response_schema import response_request
from stoker.runtime.gateway.response_writer import ResponseWriter, response_object

from .conftest import Login, RunningGateway
from .peers import Task, error_of, make_key, worker
from .test_tools import ARGUMENTS, PARAMETERS, TEXT, model

__all__ = ["model"]
pytestmark = pytest.mark.real_model

TOOL: Any = {"type": "function", "name": "weather", "description": "d", "parameters": PARAMETERS, "strict": True}
KNOWN: dict[str, type[BaseModel]] = {
    kind.model_fields["type"].annotation.__args__[0]: kind
    for name, kind in vars(responses).items()
    if name.startswith("Response") and name.endswith("Event") and hasattr(kind, "model_fields")
}
seen: list[Any] = []


class Pick(BaseModel):
    colour: str
    number: int


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0, timeout=20) as client:
        yield client


def says(text: str, finish_reason: str = "stop", logprobs: bool = False) -> Any:
    """A worker's answer, three characters at a time where it streams."""

    async def answer(task: Task) -> None:
        seen.append(task.payload)
        pieces = [text[place : place + 3] for place in range(0, len(text), 3)]
        told = [
            {"token": piece, "logprob": -0.5, "bytes": list(piece.encode()), "top_logprobs": []} for piece in pieces
        ]
        for piece, entry in zip(pieces, told, strict=True) if task.claim.stream else ():
            await task.emit({"text": piece, "ids": [1], **({"logprobs": [entry]} if logprobs else {})})
        usage = {"prompt_tokens": 7, "completion_tokens": len(pieces), "cached_tokens": 4}
        result = {"text": text, "finish_reason": finish_reason, "usage": usage}
        await task.done(result | ({"logprobs": told} if logprobs else {}), **usage)

    return answer


def shown(smollm2_dir: Any) -> str:
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    return tokenizer.decode(seen[-1]["prompt_ids"], skip_special_tokens=False)


async def test_a_whole_response(client: openai.AsyncOpenAI, broker: Broker, chat_model: str, smollm2_dir: Any) -> None:
    async with worker(broker, chat_model, says("Hello, wörld!")):
        response = await client.responses.create(
            model=chat_model,
            instructions="Be short.",
            input="Hi",
            max_output_tokens=50,
            temperature=0,
            metadata={"a": "b"},
        )
    assert (response.output_text, response.status, response.object) == ("Hello, wörld!", "completed", "response")
    assert response.usage and response.usage.input_tokens_details.cached_tokens == 4
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (7, 5, 12)
    assert (response.instructions, response.max_output_tokens, response.metadata) == ("Be short.", 50, {"a": "b"})
    assert "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>" in shown(smollm2_dir)
    assert (seen[-1]["params"]["max_tokens"], seen[-1]["params"]["temperature"]) == (50, 0.0)


async def test_an_answer_that_was_cut_is_incomplete(
    client: openai.AsyncOpenAI, broker: Broker, chat_model: str
) -> None:
    async with worker(broker, chat_model, says("Once upon", "length")):
        whole = await client.responses.create(model=chat_model, input="Hi")
        async with client.responses.stream(model=chat_model, input="Hi") as stream:
            events = [event async for event in stream]
    assert whole.status == "incomplete" and whole.incomplete_details
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert events[-1].type == "response.incomplete"


async def test_the_official_sequence_of_events(client: openai.AsyncOpenAI, broker: Broker, chat_model: str) -> None:
    async with worker(broker, chat_model, says("Hello!", logprobs=True)):
        stream = await client.responses.create(
            model=chat_model, input="Hi", stream=True, include=["message.output_text.logprobs"]
        )
        events = [event async for event in stream]
        async with client.responses.stream(model=chat_model, input="Hi") as helper:
            final = await helper.get_final_response()
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(10))
    for event in events:
        KNOWN[event.type].model_validate(event.model_dump(), strict=True)
    assert events[4].delta == "Hel" and [entry.logprob for entry in events[4].logprobs] == [-0.5]  # type: ignore[union-attr]
    assert events[-1].response.output_text == final.output_text == "Hello!"  # type: ignore[union-attr]
    assert final.status == "completed" and final.usage and final.usage.output_tokens == 2


async def test_a_conversation_that_is_gone_on_with(
    client: openai.AsyncOpenAI, broker: Broker, chat_model: str, smollm2_dir: Any, redis: Redis
) -> None:
    async with worker(broker, chat_model, says("It is Paris.")):
        first = await client.responses.create(model=chat_model, instructions="One.", input="The capital of France?")
        async with client.responses.stream(model=chat_model, input="Sure?", previous_response_id=first.id) as stream:
            second = await stream.get_final_response()
        await client.responses.create(model=chat_model, input="Really?", previous_response_id=second.id)
    assert second.previous_response_id == first.id
    prompt = shown(smollm2_dir)
    turns = ["The capital of France?", "It is Paris.", "Sure?", "It is Paris.", "Really?"]
    places = [prompt.index(turn) for turn in turns[:3]]
    assert places == sorted(places) and prompt.count("It is Paris.") == 2 and "One." not in prompt
    kept = await client.responses.retrieve(second.id)
    assert (kept.id, kept.output_text, kept.usage) == (second.id, second.output_text, second.usage)
    keys = [key async for key in redis.scan_iter(f"stoker:t:*:response:*{second.id}")]
    assert len(keys) == 1 and 3500 < await redis.ttl(keys[0]) <= 3600
    await client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError) as gone:
        await client.responses.retrieve(second.id)
    assert (gone.value.code, gone.value.param) == ("response_not_found", "id")
    with pytest.raises(openai.NotFoundError) as lost:
        await client.responses.create(model=chat_model, input="Hm?", previous_response_id=second.id)
    assert (lost.value.code, lost.value.param) == ("previous_response_not_found", "previous_response_id")


async def test_what_was_not_to_be_kept_is_not(client: openai.AsyncOpenAI, broker: Broker, chat_model: str) -> None:
    async with worker(broker, chat_model, says("x")):
        response = await client.responses.create(model=chat_model, input="Hi", store=False)
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)


async def test_another_tenants_response_is_unknown(
    root: httpx.AsyncClient, login: Login, broker: Broker, chat_model: str
) -> None:
    ann, bob = [login((await make_key(root, name, "invoke"))["key"]) for name in ("ann", "bob")]
    async with worker(broker, chat_model, says("x")):
        made = (await ann.post("/v1/responses", json={"model": chat_model, "input": "Hi"})).json()["id"]
        assert (await ann.get(f"/v1/responses/{made}")).status_code == 200
        assert error_of(await bob.get(f"/v1/responses/{made}"))["code"] == "response_not_found"
        assert (await bob.delete(f"/v1/responses/{made}")).status_code == 404
        body = {"model": chat_model, "input": "Hi", "previous_response_id": made}
        assert error_of(await bob.post("/v1/responses", json=body))["code"] == "previous_response_not_found"
        await root.delete("/v1/tenants/ann")
        again = login((await make_key(root, "ann", "invoke"))["key"])
        assert (await again.get(f"/v1/responses/{made}")).status_code == 404


async def test_tools_are_called_and_answered(
    client: openai.AsyncOpenAI, broker: Broker, model: str, smollm2_dir: Any
) -> None:
    async with worker(broker, model, says(TEXT)):
        whole = await client.responses.create(model=model, input="How is the weather?", tools=[TOOL])
        stream = await client.responses.create(model=model, input="How?", tools=[TOOL], stream=True)
        events = [event async for event in stream]
    said, call = whole.output
    assert (whole.output_text, said.type, call.type) == ("I look. ", "message", "function_call")
    assert call.type == "function_call" and (call.name, call.arguments) == ("weather", ARGUMENTS)
    told = events[-1].response.output[1]  # type: ignore[union-attr]
    assert (told.name, told.arguments) == (call.name, call.arguments)
    parts = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(parts) == ARGUMENTS and len(parts) > 2
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    async with worker(broker, model, says("It rains.")):
        await client.responses.create(model=model, input=output, previous_response_id=whole.id, tools=[TOOL])
    prompt = shown(smollm2_dir)
    assert '[weather {"city": "Köln"}]' in prompt and prompt.rstrip().endswith("tool: rain")


async def test_parsed_answers(client: openai.AsyncOpenAI, broker: Broker, chat_model: str) -> None:
    async with worker(broker, chat_model, says('{"colour": "red", "number": 3}')):
        parsed = await client.responses.parse(model=chat_model, input="Pick", text_format=Pick)
    assert parsed.output_parsed == Pick(colour="red", number=3)
    assert "colour" in seen[-1]["params"]["grammar"]


async def test_a_response_is_replayed_under_its_idempotency_key(
    http: httpx.AsyncClient, broker: Broker, chat_model: str
) -> None:
    body, headers = {"model": chat_model, "input": "Hi"}, {"idempotency-key": "response-1"}
    async with worker(broker, chat_model, says("x")):
        first, again = [await http.post("/v1/responses", json=body, headers=headers) for _ in range(2)]
    assert again.headers["idempotency-replayed"] == "true"
    assert again.json()["id"] == first.json()["id"] and again.json()["output"] == first.json()["output"]


async def test_a_repeated_request_brings_no_deleted_response_back(
    http: httpx.AsyncClient, redis: Redis, broker: Broker, chat_model: str
) -> None:
    body, headers = {"model": chat_model, "input": "Hi"}, {"idempotency-key": f"deleted-{chat_model}"}
    async with worker(broker, chat_model, says("x")):
        first = (await http.post("/v1/responses", json=body, headers=headers)).json()
        path = f"/v1/responses/{first['id']}"
        assert [(await http.delete(path)).status_code for _ in range(2)] == [200, 404]
        again = await http.post("/v1/responses", json=body, headers=headers)
    assert again.json()["id"] == first["id"]
    assert (await http.get(path)).status_code == 404
    [left] = [name async for name in redis.scan_iter(match=f"*{first['id']}")]
    assert await redis.pttl(left) > 0


async def test_a_request_is_replayed_though_what_it_went_on_from_is_deleted(
    http: httpx.AsyncClient, broker: Broker, chat_model: str
) -> None:
    headers = {"idempotency-key": f"went-on-{chat_model}"}
    async with worker(broker, chat_model, says("x")):
        before = (await http.post("/v1/responses", json={"model": chat_model, "input": "Hi"})).json()["id"]
        body = {"model": chat_model, "input": "And?", "previous_response_id": before}
        first = (await http.post("/v1/responses", json=body, headers=headers)).json()
        await http.delete(f"/v1/responses/{before}")
        again = await http.post("/v1/responses", json=body, headers=headers)
        assert (again.json()["id"], again.json()["output"]) == (first["id"], first["output"])
        for fields in ({}, {"idempotency-key": "another"}):
            refused = await http.post("/v1/responses", json=body, headers=fields)
            assert (refused.status_code, error_of(refused)["code"]) == (404, "previous_response_not_found")
        other = await http.post("/v1/responses", json=body | {"input": "Else?"}, headers=headers)
        assert (other.status_code, error_of(other)["code"]) == (409, "idempotency_key_reused")
        third = {"model": chat_model, "input": "On", "previous_response_id": first["id"]}
        assert (await http.post("/v1/responses", json=third)).status_code == 200
    assert "Hi" not in str(again.json())


async def test_a_failure_amid_a_stream(client: openai.AsyncOpenAI, broker: Broker, chat_model: str) -> None:
    async def fails(task: Task) -> None:
        await task.emit({"text": "Hel", "ids": [1]})
        await task.fail({"type": "model_error", "message": "not a number in the logits"})

    async with worker(broker, chat_model, fails):
        stream = await client.responses.create(model=chat_model, input="Hi", stream=True)
        with pytest.raises(openai.APIError, match="not a number"):
            async for _ in stream:
                pass


CALLS = [f'<tool_call>{{"name": "{name}", "arguments": {{"a": "ü"}}}}</tool_call>' for name in "fg"]
WORDS = st.lists(st.sampled_from(["a", "ü", "\U0001f600", " ", "<tool", "{", *CALLS]), max_size=10).map("".join)


@settings(max_examples=150, deadline=None)
@given(text=WORDS, cuts=st.sets(st.integers(0, 200), max_size=12), tools=st.booleans(), logprobs=st.booleans())
def test_events_add_up_to_the_whole_response(text: str, cuts: set[int], tools: bool, logprobs: bool) -> None:
    """However the text is cut; whatever follows which."""
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[a:b] for a, b in zip(places, places[1:], strict=False)]
    whole, events = written([text], tools, logprobs)
    streamed, told = written(pieces, tools, logprobs)
    for part in (part for item in streamed["output"] for part in item.get("content", ())):
        assert len(part["logprobs"]) == (len(pieces) if logprobs and not tools else 0)
        part["logprobs"] = whole["output"][0]["content"][0]["logprobs"] if logprobs and not tools else []
    assert streamed == whole
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert made_of(told) == [
        (item["id"], item.get("arguments") or "".join(part["text"] for part in item.get("content", ())))
        for item in streamed["output"]
    ]
    for event in told:
        KNOWN[event["type"]].model_validate(event)


def written(pieces: list[str], tools: bool, logprobs: bool) -> tuple[Any, list[Any]]:
    """The response and its events, each as it was when it was told."""
    request = response_request({"model": "m", "input": "x"})
    writer = ResponseWriter(response_object(request, "resp_job", 0), "hermes" if tools else "")
    events = told(writer.begin())
    for piece in pieces:
        entries: Any = [{"token": piece, "logprob": -1.0, "bytes": [], "top_logprobs": []}] if logprobs else None
        events += told(writer.piece(piece, entries))
    events += told(writer.end("stop", {"prompt_tokens": 1, "completion_tokens": 2}))
    assert events[-1]["response"] == writer.response
    return json.loads(json.dumps(writer.response)), events


def told(events: list[Any]) -> list[Any]:
    return json.loads(json.dumps(events))


def made_of(events: list[Any]) -> list[tuple[str, str]]:
    """Items by what their deltas say."""
    items: dict[str, str] = {}
    for event in events:
        if event["type"] == "response.output_item.added":
            items[event["item"]["id"]] = ""
        elif event["type"].endswith(".delta"):
            items[event["item_id"]] += event["delta"]
        elif event["type"] == "response.output_text.done":
            assert items[event["item_id"]] == event["text"]
        elif event["type"] == "response.function_call_arguments.done":
            assert items[event["item_id"]] == event["arguments"]
    return list(items.items())
