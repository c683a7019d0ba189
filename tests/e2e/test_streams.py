"""Streamed and whole answers are the same, whatever is asked for together: the real engine, the whole path."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.runtime.local import LocalStack

pytestmark = [pytest.mark.real_model, pytest.mark.xdist_group("e2e")]

EXAMPLES = 14
QUESTION = "Name a colour and a number."
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "number": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["colour", "number"],
    "additionalProperties": False,
}
FORMATS: Any = [None, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}]
Answer = dict[str, Any]


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, Answer]:
    """A route and a body for it."""
    sampling = {
        "model": "chat",
        "temperature": draw(st.sampled_from([0, 1.0])),
        "top_p": draw(st.sampled_from([1, 0.8])),
    }
    route = draw(st.sampled_from(["/v1/chat/completions", "/v1/completions", "/v1/responses"]))
    if route == "/v1/responses":
        logprobs = draw(st.sampled_from([None, ["message.output_text.logprobs"]]))
        asked = {"input": QUESTION, "max_output_tokens": 8, "include": logprobs, "store": False}
        return route, {**sampling, "temperature": 0, **asked}
    body = {
        **sampling,
        "max_tokens": draw(st.integers(1, 10)),
        "seed": draw(st.integers(0, 99)),
        "n": draw(st.integers(1, 2)),
        "stop": draw(st.sampled_from([None, " ", ["e", "a c"]])),
        "presence_penalty": draw(st.sampled_from([0, 1.5])),
        "frequency_penalty": draw(st.sampled_from([0, -0.5])),
        "logit_bias": draw(st.sampled_from([None, {"260": -100}])),
        "response_format": draw(st.sampled_from(FORMATS)),
    }
    if route == "/v1/completions":
        return route, {**body, "prompt": "One, two,", "logprobs": draw(st.sampled_from([None, 2]))}
    logprobs = draw(st.booleans())
    asked = {"logprobs": logprobs, "top_logprobs": 2 if logprobs else None}
    return route, {**body, "messages": [{"role": "user", "content": QUESTION}], **asked}


def test_streamed_and_whole_answers_are_the_same(stack: LocalStack) -> None:
    seen: set[str] = set()

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(asked=bodies())
    def check(asked: tuple[str, Answer]) -> None:
        route, body = asked
        seen.add(route)
        whole = ask(stack, route, body).json()
        options = {} if route == "/v1/responses" else {"stream_options": {"include_usage": True}}
        events = events_of(ask(stack, route, {**body, "stream": True, **options}))
        told, wanted = (
            (from_events(events), of_response(whole))
            if "responses" in route
            else (from_chunks(events), of_choices(whole))
        )
        assert told["texts"] == wanted["texts"] and told["ends"] == wanted["ends"], body
        assert told["tokens"] == wanted["tokens"] and told["usage"] == wanted["usage"], body
        assert told["logprobs"] == pytest.approx(wanted["logprobs"], abs=1e-3), body

    check()
    assert len(seen) == 3


def ask(stack: LocalStack, route: str, body: Answer) -> httpx.Response:
    answer = httpx.post(f"{stack.url}{route}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


def events_of(answer: httpx.Response) -> list[Any]:
    lines = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def counted(usage: Answer) -> tuple[int, int]:
    return (
        usage.get("prompt_tokens") or usage["input_tokens"],
        usage.get("completion_tokens") or usage["output_tokens"],
    )


def of_choices(whole: Answer) -> Answer:
    choices = sorted(whole["choices"], key=lambda choice: choice["index"])
    told = [entry for choice in choices for entry in entries(choice["logprobs"])]
    return {
        "texts": [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices],
        "ends": [choice["finish_reason"] for choice in choices],
        "tokens": [token for token, _ in told],
        "logprobs": [logprob for _, logprob in told],
        "usage": counted(whole["usage"]),
    }


def entries(logprobs: Any) -> list[tuple[str, float]]:
    if not logprobs:
        return []
    if "content" in logprobs:
        return [(entry["token"], entry["logprob"]) for entry in logprobs["content"]]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))


def from_chunks(chunks: list[Any]) -> Answer:
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    made: Answer = {"texts": [], "ends": [], "tokens": [], "logprobs": [], "usage": counted(chunks[-1]["usage"])}
    for index in sorted({part["index"] for part in parts}):
        own = [part for part in parts if part["index"] == index]
        made["texts"].append(
            "".join(part["delta"].get("content", "") if "delta" in part else part["text"] for part in own)
        )
        made["ends"].append(own[-1]["finish_reason"])
        told = [entry for part in own for entry in entries(part["logprobs"])]
        made["tokens"] += [token for token, _ in told]
        made["logprobs"] += [logprob for _, logprob in told]
    return made


def of_response(whole: Answer) -> Answer:
    part = whole["output"][0]["content"][0]
    return {
        "texts": [part["text"]],
        "ends": [whole["status"]],
        "tokens": [entry["token"] for entry in part["logprobs"]],
        "logprobs": [entry["logprob"] for entry in part["logprobs"]],
        "usage": counted(whole["usage"]),
    }


def from_events(events: list[Any]) -> Answer:
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    told = [entry for event in deltas for entry in event["logprobs"]]
    return {
        "texts": ["".join(event["delta"] for event in deltas)],
        "ends": [events[-1]["response"]["status"]],
        "tokens": [entry["token"] for entry in told],
        "logprobs": [entry["logprob"] for entry in told],
        "usage": counted(events[-1]["response"]["usage"]),
    }
