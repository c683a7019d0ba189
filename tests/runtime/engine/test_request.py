import math
from typing import Any

import pytest

from stoker.runtime.engine.request import GenerationRequest, SamplingParams, validate


def request(prompt: Any = (1, 2, 3), prior: Any = (), **params: Any) -> GenerationRequest:
    return GenerationRequest("r", prompt, SamplingParams.from_dict({"max_tokens": 4, **params}), prior)


@pytest.mark.parametrize(
    "good",
    [
        request(),
        request(prompt=[0, 96]),
        request(prompt=[1] * 28),
        request(prior=[1, 2, 3, 4]),
        request(temperature=0, top_p=1, top_k=3, min_p=0.5, seed=-(2**63), stop_token_ids=[3, 4]),
    ],
)
def test_what_can_run_passes(good: GenerationRequest) -> None:
    validate(good, vocab_size=97, max_model_len=32)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request(prompt=[]), "the prompt is empty"),
        (request(prompt=[1, 97]), "prompt token id 97 is outside 0 to 96"),
        (request(prompt=[-1]), "prompt token id -1 is outside"),
        (request(prompt=[2**70]), "prompt must be a list of token ids"),
        (request(prompt=["a"]), "prompt must be a list of token ids"),
        (request(prompt=[1.5]), "prompt must be a list of token ids"),
        (request(prior=[97]), "prior token id 97"),
        (request(prior=[1] * 5), "5 prior tokens are more than max_tokens"),
        (request(prompt=[1] * 29), r"prompt \(29 tokens\) plus max_tokens \(4\) is 33, over .* of 32 tokens"),
        (request(max_tokens=0), "max_tokens must be 1 or more"),
        (request(max_tokens=2.5), "max_tokens must be an integer"),
        (request(temperature=-0.1), "temperature must be 0 or more"),
        (request(temperature=math.nan), "temperature must be 0 or more"),
        (request(temperature="hot"), "temperature must be a number"),
        (request(top_p=0), "top_p must be above 0"),
        (request(top_p=math.nan), "top_p must be above 0"),
        (request(min_p=1.5), "min_p must be 0 to 1"),
        (request(top_k=-1), "top_k must be 0"),
        (request(seed=2**63), "seed must fit in 64 bits"),
        (request(stop_token_ids=[97]), "stop_token_ids token id 97"),
    ],
)
def test_what_can_never_run_says_why(bad: GenerationRequest, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate(bad, vocab_size=97, max_model_len=32)


def test_unknown_and_missing_parameters() -> None:
    with pytest.raises(ValueError, match="unknown sampling parameter.*beam_width"):
        SamplingParams.from_dict({"max_tokens": 1, "beam_width": 4})
    with pytest.raises(ValueError, match="max_tokens is missing"):
        SamplingParams.from_dict({})
