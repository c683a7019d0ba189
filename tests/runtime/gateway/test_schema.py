import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.runtime.gateway.errors import ApiError
from stoker.runtime.gateway.schema import ToolCall, chat_request, completion_request

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}

BAD_CHATS = [
    ({}, "model"),
    ({"model": "m"}, "messages"),
    ({"model": "m", "messages": []}, "messages"),
    ({"model": "m", "messages": "hi"}, "messages"),
    ({"model": "m", "messages": [{"role": "wizard", "content": "hi"}]}, "messages.0.role"),
    ({"model": "m", "messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
    ({**CHAT, "model": 3}, "model"),
    ({**CHAT, "temperature": "0.5"}, "temperature"),
    ({**CHAT, "temperature": True}, "temperature"),
    ({**CHAT, "temperature": 2.5}, "temperature"),
    ({**CHAT, "temperature": math.inf}, "temperature"),
    ({**CHAT, "max_tokens": 0}, "max_tokens"),
    ({**CHAT, "max_tokens": 1.5}, "max_tokens"),
    ({**CHAT, "max_completion_tokens": -1}, "max_completion_tokens"),
    ({**CHAT, "top_p": 1.1}, "top_p"),
    ({**CHAT, "top_k": -2}, "top_k"),
    ({**CHAT, "seed": 1 << 63}, "seed"),
    ({**CHAT, "stop": ["a"] * 5}, "stop"),
    ({**CHAT, "stop": ""}, "stop"),
    ({**CHAT, "stream": "yes"}, "stream"),
    ({**CHAT, "stream_options": {"include_usage": True}}, "stream_options"),
    ({**CHAT, "n": 0}, "n"),
    ({**CHAT, "n": 33}, "n"),
    ({**CHAT, "n": True}, "n"),
    ({**CHAT, "logprobs": 1}, "logprobs"),
    ({**CHAT, "top_logprobs": 3}, "top_logprobs"),
    ({**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({**CHAT, "tools": [{"type": "function"}]}, "tools"),
    ({**CHAT, "response_format": {"type": "xml"}}, "response_format.type"),
    ({**CHAT, "response_format": {"type": "json_schema"}}, "response_format"),
    ({**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema"),
    ({**CHAT, "structured_outputs": {}}, "structured_outputs"),
    ({**CHAT, "structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({**CHAT, "frequency_penalty": 2.5}, "frequency_penalty"),
    ({**CHAT, "presence_penalty": -2.1}, "presence_penalty"),
    ({**CHAT, "repetition_penalty": 0}, "repetition_penalty"),
    ({**CHAT, "logit_bias": {"5": 101}}, "logit_bias.5"),
    ({**CHAT, "logit_bias": [5]}, "logit_bias"),
    ({**CHAT, "logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
]
BAD_TEXTS = [
    ({"model": "m"}, "prompt"),
    ({**TEXT, "prompt": 7}, "prompt"),
    ({**TEXT, "prompt": ["a", "b"]}, "prompt"),
    ({**TEXT, "prompt": [[1], [2]]}, "prompt"),
    ({**TEXT, "prompt": [1, "a"]}, "prompt"),
    ({**TEXT, "echo": True}, "echo"),
    ({**TEXT, "suffix": "end"}, "suffix"),
    ({**TEXT, "best_of": 3}, "best_of"),
    ({**TEXT, "n": 2, "best_of": 1}, "best_of"),
    ({**TEXT, "logprobs": 21}, "logprobs"),
    ({**TEXT, "logprobs": True}, "logprobs"),
]


def refusal(error: ApiError) -> tuple[int, str, str | None]:
    return error.status, error.type, error.param


@pytest.mark.parametrize(("body", "param"), BAD_CHATS)
def test_bad_chats_are_400_and_name_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat_request(body)
    status, kind, named = refusal(caught.value)
    assert (status, kind) == (400, "invalid_request_error")
    assert named is not None and named.startswith(param)
    assert param.split(".")[0] in caught.value.message or "content" in caught.value.message


@pytest.mark.parametrize(("body", "param"), BAD_TEXTS)
def test_bad_completions_are_400_and_name_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        _ = completion_request(body).single_prompt
    status, kind, named = refusal(caught.value)
    assert (status, kind) == (400, "invalid_request_error")
    assert named is not None and named.startswith(param)


def test_what_openai_clients_send_is_taken() -> None:
    request = chat_request(
        {
            **CHAT,
            "temperature": 0,
            "max_tokens": None,
            "max_completion_tokens": 5,
            "stop": ["a", "b"],
            "stream": True,
            "stream_options": {"include_usage": True, "include_obfuscation": False},
            "n": 1,
            "logprobs": False,
            "tools": [],
            "tool_choice": "none",
            "response_format": {"type": "text"},
            "frequency_penalty": 0.0,
            "presence_penalty": 0,
            "logit_bias": {},
            "user": "someone",
            "metadata": {"a": "b"},
            "parallel_tool_calls": True,
            "service_tier": "auto",
            "store": False,
        }
    )
    assert request.token_limit == 5
    assert request.stop_strings == ["a", "b"]
    assert request.include_usage


def test_text_parts_are_joined_and_developers_are_systems() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": parts}, {"role": "assistant", "content": None}]
    request = chat_request({"model": "m", "messages": messages})
    assert [message.as_template_input() for message in request.messages] == [
        {"role": "system", "content": "one\ntwo"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('{"a": 1}', {"a": 1}),
        ("no JSON", "no JSON"),
        ("[" * 100_000, "[" * 100_000),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
    ],
    ids=lambda value: str(value)[:20],
)
def test_arguments_that_are_no_json_are_shown_as_they_are(text: str, shown: Any) -> None:
    call = ToolCall.model_validate({"id": "1", "function": {"name": "f", "arguments": text}})
    assert call.as_template_input()["function"]["arguments"] == shown


@pytest.mark.parametrize(
    ("prompt", "single"),
    [("text", "text"), ([1, 2], [1, 2]), (["text"], "text"), ([[1, 2]], [1, 2]), ([], [])],
)
def test_one_prompt_in_each_of_its_forms(prompt: Any, single: Any) -> None:
    assert completion_request({"model": "m", "prompt": prompt}).single_prompt == single


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    "model", "messages", "prompt", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stream", "n", "tools",
    "stream_options", "max_tokens", "logprobs", "logit_bias", "ignore_eos", "response_format",
    "structured_outputs", "presence_penalty", "best_of", "top_logprobs",
]  # fmt: skip


@given(st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_nonsense_is_refused_or_taken_but_never_an_accident(body: dict[str, Any]) -> None:
    for parse in (chat_request, completion_request):
        try:
            parse({**TEXT, **CHAT, **body})
        except ApiError as error:
            assert error.status == 400
