"""What is streamed is the whole answer, however tokens come and wherever characters and stop strings are cut."""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.queue.events import Event
from stoker.queue.records import Claim, pack
from stoker.runtime.gateway.metrics import Metrics
from stoker.runtime.gateway.schema import ChatRequest, CompletionRequest, chat_request, completion_request
from stoker.runtime.gateway.token_stream import TokenFrames, shape_of
from stoker.runtime.gateway.tool_calls import message_of
from stoker.runtime.worker.answer import Answer
from stoker.runtime.worker.deltas import chunk_of


class Utf8:
    """Token n is the byte n."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")


@dataclass
class ToldCall:
    """A call whose job has told all its events."""

    events: list[Event]
    result: dict[str, Any]
    job_id: str = "job"
    function: str = "f"

    async def __aenter__(self) -> "ToldCall":
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def __aiter__(self) -> AsyncIterator[Event]:
        for event in self.events:
            yield event

    async def outcome_at(self, event: Event) -> Any:
        return SimpleNamespace(value=lambda: self.result)


@dataclass
class Talk:
    """Choices' bytes, each cut into deltas."""

    choices: list[list[bytes]]
    order: list[int]
    stop: list[str] = field(default_factory=list)
    logprobs: bool = False
    tools: bool = False


def entry(token: int) -> dict[str, Any]:
    named = {"token": bytes([token]).decode(errors="replace"), "logprob": -token / 10, "bytes": [token]}
    return {**named, "top_logprobs": [{**named, "token": "other"}]}


def event(kind: Any, number: int, data: bytes) -> Event:
    return Event("job", kind, f"{number}-0", 1, data, None)


def tell(talk: Talk) -> tuple[Answer, list[Event]]:
    """What the worker makes of it."""
    params = {"max_tokens": 1000, "stop": talk.stop, "n": len(talk.choices)}
    body = {"prompt_ids": [1], "params": params}
    claim = Claim("f-1", "f", "t", pack(body), 1, 1, 1, True, "", 0, 0, 0, [])
    answer, events = Answer(claim, Utf8()), []
    waiting = [list(deltas) for deltas in talk.choices]
    for index in [*talk.order, *range(len(waiting))] * 40:
        index %= len(waiting)
        choice = answer.choices[index]
        if choice.finish_reason is not None:
            continue
        tokens = list(waiting[index].pop(0)) if waiting[index] else []
        entries = [entry(token) for token in tokens] if talk.logprobs else []
        before = choice.tokens
        text = choice.absorb(tokens, None if waiting[index] else "length", entries)
        told = chunk_of(text, tokens, index, entries[: choice.tokens - before])
        events.append(event("chunk", len(events), pack(told)))
    assert not answer.unfinished
    return answer, [*events, event("end", len(events), b"x")]


async def streamed(request: ChatRequest | CompletionRequest, answer: Answer, events: list[Event]) -> list[Any]:
    incoming: Any = SimpleNamespace(gateway=SimpleNamespace(metrics=Metrics()), started=0.0)
    call: Any = ToldCall(events, answer.result())
    frames = b"".join([frame async for frame in TokenFrames(incoming, call, request).frames()])
    data = [line[6:] for line in frames.decode().split("\n") if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(line) for line in data]


def put_together(chunks: list[Any], chat: bool, count: int) -> list[dict[str, Any]]:
    """The choices of a whole answer, from the chunks of a stream."""
    made = []
    for index in range(count):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)
        said = [choice["logprobs"] for choice in own if choice["logprobs"]]
        logprobs = (
            {key: sum((part[key] for part in said), []) for key in said[0] if said[0][key] is not None}
            if said
            else None
        )
        body = {"index": index, "finish_reason": own[-1]["finish_reason"]}
        if chat:
            assert own[0]["delta"]["role"] == "assistant" and all("role" not in choice["delta"] for choice in own[1:])
            message = message_of([choice["delta"] for choice in own])
            body["message"] = {"role": "assistant", "refusal": None, **message}
            logprobs = {**logprobs, "refusal": None} if logprobs else None
        else:
            body["text"] = "".join(choice["text"] for choice in own)
        made.append({**body, "logprobs": logprobs})
    return made


CALL = '<tool_call>{"name": "f", "arguments": {"a": "ü"}}</tool_call>'
PIECES = st.lists(st.sampled_from(["a", "EN", "D", "ü", "\U0001f600", "stop", " ", CALL, "<tool"]), max_size=12).map(
    "".join
)


@st.composite
def talks(draw: st.DrawFn) -> Talk:
    choices = []
    for _ in range(draw(st.integers(1, 3))):
        data = draw(PIECES).encode()
        cuts = sorted(draw(st.sets(st.integers(0, len(data)), max_size=8)))
        choices.append([data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)])
    order = draw(st.lists(st.integers(0, 2), max_size=12))
    return Talk(
        choices,
        order,
        draw(st.sampled_from([[], ["END"], ["EN", "stop"], ["\U0001f600"]])),
        logprobs=draw(st.booleans()),
        tools=draw(st.booleans()),
    )


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
async def test_pieces_add_up_to_the_whole_answer(chat: bool) -> None:
    @settings(max_examples=60, deadline=None)
    @given(talk=talks())
    def check(talk: Talk) -> None:
        seen.append(talk)

    seen: list[Talk] = []
    check()
    for talk in seen:
        answer, events = tell(talk)
        fields = {"model": "m", "n": len(talk.choices), "stream": True, "stream_options": {"include_usage": True}}
        request: Any = (
            chat_request({**fields, "messages": [{"role": "user", "content": "x"}]})
            if chat
            else completion_request({**fields, "prompt": "x"})
        )
        if chat and talk.tools:
            request.use_tools("hermes")
        *chunks, counted = await streamed(request, answer, events)
        whole: Any = shape_of(request, "job").whole(answer.result())
        assert put_together(chunks, chat, len(talk.choices)) == whole["choices"], talk
        assert (counted["choices"], counted["usage"]) == ([], whole["usage"])


async def test_what_no_chunk_told_comes_with_the_end() -> None:
    talk = Talk([[b"one", b" two"], [b"three"]], [0, 1], logprobs=True)
    answer, events = tell(talk)
    fields = {"model": "m", "n": 2, "stream": True, "messages": [{"role": "user", "content": "x"}]}
    for kept in range(len(events)):
        request = chat_request(fields)
        chunks = await streamed(request, answer, events[:kept] + events[-1:])
        assert put_together(chunks, True, 2) == shape_of(request, "job").whole(answer.result())["choices"]


async def test_token_offsets_count_characters() -> None:
    answer, _ = tell(Talk([["äb".encode(), b"c"]], [], logprobs=True))
    whole: Any = shape_of(completion_request({"model": "m", "prompt": "x"}), "job").whole(answer.result())
    assert whole["choices"][0]["logprobs"] == {
        "tokens": ["\ufffd", "\ufffd", "b", "c"],
        "token_logprobs": [-19.5, -16.4, -9.8, -9.9],
        "top_logprobs": [
            {"other": -19.5, "\ufffd": -19.5},
            {"other": -16.4, "\ufffd": -16.4},
            {"other": -9.8, "b": -9.8},
            {"other": -9.9, "c": -9.9},
        ],
        "text_offset": [0, 1, 1, 2],
    }
