from dataclasses import replace
from typing import Any

import pytest

from stoker.runtime.gateway.errors import ApiError
from stoker.runtime.gateway.generation import (
    check_prompt,
    completion_budget,
    context_limit,
    estimated_cost,
    generation_payload,
)
from stoker.runtime.gateway.prompts import ModelFacts
from stoker.runtime.gateway.schema import chat_request
from stoker.runtime.gateway.shapes import ChatShape, CompletionShape, usage_object
from stoker.runtime.spec import FunctionSpec, ModelOptions

FACTS = ModelFacts("r", context=100, vocabulary=50, stop_ids=(2, 7), defaults={"temperature": 0.6, "top_k": 40})
RESULT = {
    "text": "Paris.",
    "finish_reason": "stop",
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1},
}


def payload(prompt: list[int] | None = None, **fields: Any) -> dict[str, Any]:
    request = chat_request({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})
    return generation_payload(request, prompt or [1, 2, 3], FACTS, FACTS.context)


def test_defaults_come_from_the_model() -> None:
    params = payload()["params"]
    seed = params.pop("seed")
    assert 0 <= seed < 1 << 63
    assert params == {
        "max_tokens": 97,
        "temperature": 0.6,
        "top_p": 1.0,
        "top_k": 40,
        "min_p": 0.0,
        "stop": [],
        "stop_token_ids": [2, 7],
        "ignore_eos": False,
        "include_stop": False,
    }


def test_what_is_asked_for_wins_over_the_defaults() -> None:
    params = payload(
        temperature=0, top_p=0.5, top_k=-1, min_p=0.1, seed=-5, stop="x", max_completion_tokens=4, max_tokens=9
    )["params"]
    assert (params["temperature"], params["top_p"], params["top_k"], params["min_p"]) == (0.0, 0.5, 0, 0.1)
    assert (params["seed"], params["stop"], params["max_tokens"]) == (-5, ["x"], 4)


def test_top_p_of_zero_keeps_the_best_token_only() -> None:
    assert 0 < payload(top_p=0)["params"]["top_p"] < 1e-5


def test_seeds_that_were_not_given_differ() -> None:
    assert payload()["params"]["seed"] != payload()["params"]["seed"]


def test_ignoring_eos_ignores_every_stop_id() -> None:
    params = payload(ignore_eos=True, max_tokens=5)["params"]
    assert (params["ignore_eos"], params["stop_token_ids"]) == (True, [])


@pytest.mark.parametrize(
    ("prompt", "asked", "budget"), [(90, None, 10), (90, 10, 10), (99, None, 1), (1, 99, 99), (50, 1, 1)]
)
def test_the_budget_is_what_was_asked_or_the_room_left(prompt: int, asked: int | None, budget: int) -> None:
    assert completion_budget(prompt, asked, 100) == budget


@pytest.mark.parametrize(("prompt", "asked"), [(100, None), (101, None), (90, 11), (100, 1)])
def test_an_overflow_is_400_with_both_counts(prompt: int, asked: int | None) -> None:
    with pytest.raises(ApiError) as caught:
        completion_budget(prompt, asked, 100)
    error = caught.value
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert "100 tokens" in error.message and str(prompt) in error.message
    assert asked is None or f"{asked} for the completion" in error.message


@pytest.mark.parametrize("ids", [[], [-1], [50], [1, 2, 10**12]])
def test_no_bad_token_id_gets_through(ids: list[int]) -> None:
    with pytest.raises(ApiError) as caught:
        check_prompt(ids, 50)
    assert caught.value.status == 400


def test_a_function_may_have_a_smaller_context_than_its_model() -> None:
    small = FunctionSpec(name="f", kind="llm", weights="file:///m", model=ModelOptions(max_model_len=64))
    large = FunctionSpec(name="f", kind="llm", weights="file:///m", model=ModelOptions(max_model_len=640))
    assert (context_limit(small, FACTS), context_limit(large, FACTS)) == (64, 100)


def test_cost_counts_completions_twice_and_bounds_the_unknown() -> None:
    assert estimated_cost(payload(max_tokens=10)) == 3 + 20
    assert estimated_cost({"prompt_ids": [1], "params": {"max_tokens": 10**6}}) < 1000


def test_usage_always_says_how_much_was_cached() -> None:
    assert usage_object({}) == {
        "prompt_tokens": 0,
        "completion_tokens": 0,
        "total_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_streamed_chat_equals_whole_chat() -> None:
    shape = ChatShape("job", "m", 5, include_usage=True)
    chunks = [shape.first(), shape.text("Par"), shape.text("is."), shape.last("stop"), shape.usage(RESULT["usage"])]
    whole = shape.whole(RESULT)
    assert {chunk["id"] for chunk in chunks if chunk} == {whole["id"]}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1] if chunk]
    assert "".join(delta.get("content", "") for delta in deltas) == whole["choices"][0]["message"]["content"]
    assert deltas[0]["role"] == "assistant"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1] if chunk] == [None, None, None, "stop"]
    assert [chunk.get("usage") for chunk in chunks if chunk] == [None, None, None, None, whole["usage"]]
    assert chunks[-1] is not None and chunks[-1]["choices"] == []


def test_streams_without_usage_have_no_usage_field() -> None:
    assert "usage" not in ChatShape("job", "m", 5).text("a")
    assert "usage" not in CompletionShape("job", "m", 5).text("a")


def test_completions_have_their_own_shape() -> None:
    whole = CompletionShape("job", "m", 5).whole(RESULT)
    assert whole["object"] == "text_completion"
    assert whole["choices"] == [{"index": 0, "text": "Paris.", "logprobs": None, "finish_reason": "stop"}]


def test_what_was_not_asked_for_is_not_sent() -> None:
    neutral = payload(
        n=1, presence_penalty=0, frequency_penalty=0.0, repetition_penalty=1, logit_bias={}, logprobs=False
    )
    assert neutral["params"].keys() == payload()["params"].keys()


def test_what_changes_the_distribution_is_sent() -> None:
    params = payload(
        n=3,
        presence_penalty=0.5,
        frequency_penalty=-1,
        logit_bias={"49": -100, "0": 1.5},
        logprobs=True,
        top_logprobs=2,
    )["params"]
    assert params["n"] == 3
    assert (params["presence_penalty"], params["frequency_penalty"]) == (0.5, -1.0)
    assert params["logit_bias"] == [(49, -100.0), (0, 1.5)]
    assert params["logprobs"] == 2
    assert payload(logprobs=True)["params"]["logprobs"] == 0


def test_a_models_own_repetition_penalty_is_its_default() -> None:
    facts = replace(FACTS, defaults={"repetition_penalty": 1.1})
    request = chat_request({"model": "m", "messages": [{"role": "user", "content": "x"}]})
    assert generation_payload(request, [1], facts, 100)["params"]["repetition_penalty"] == 1.1


@pytest.mark.parametrize(
    "token",
    ["50", "-1", "x", "1.5", "", "9" * 30, "0" * 12 + "50", "0" * 12 + "9" * 5000, "\u0663"],
    ids=lambda token: token[:20],
)
def test_biases_of_unknown_tokens_are_refused(token: str) -> None:
    with pytest.raises(ApiError) as caught:
        payload(logit_bias={token: 1})
    assert (caught.value.status, caught.value.param) == (400, "logit_bias")


def test_every_choice_costs() -> None:
    assert estimated_cost(payload(max_tokens=10, n=4)) == 3 + 80
