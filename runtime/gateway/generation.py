"""Pure half of the language-model routes: a request becomes a job's payload."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.runtime.gateway.errors import ApiError, bad_request
from stoker.runtime.gateway.prompts import ModelFacts
from stoker.runtime.gateway.schema import Sampling
from stoker.runtime.spec import FunctionSpec

MIN_TOP_P = 1e-6
EXPECTED_COMPLETION = 256
DECODE_WEIGHT = 2.0
MOST_DIGITS = 12
NEUTRAL = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}


def context_limit(spec: FunctionSpec, facts: ModelFacts) -> int:
    return min(spec.model.max_model_len or facts.context, facts.context)


def check_prompt(ids: Sequence[int], vocabulary: int) -> None:
    """One bad id must never reach the engine, where it would be out of bounds of the embedding."""
    if not ids:
        raise bad_request("The prompt is empty.", param="prompt")
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise bad_request(f"Token ids must be from 0 to {vocabulary - 1}.", param="prompt")


def completion_budget(prompt: int, asked: int | None, context: int) -> int:
    """`max_tokens` if it fits; the room that is left when it wasn't given. Never cut silently."""
    if prompt >= context or prompt + (asked or 0) > context:
        raise context_overflow(prompt, asked, context)
    return asked or context - prompt


def context_overflow(prompt: int, asked: int | None, context: int) -> ApiError:
    wanted = f"{prompt} in the prompt and {asked} for the completion" if asked else f"{prompt} in the prompt"
    total = prompt + (asked or 0)
    message = (
        f"This model's maximum context length is {context} tokens. However, you requested {total} tokens ({wanted})."
        " Please shorten the prompt or ask for fewer tokens."
    )
    return bad_request(message, param="max_tokens" if asked and prompt < context else "prompt", code=OVERFLOW)


OVERFLOW = "context_length_exceeded"


def generation_payload(
    request: Sampling, ids: list[int], facts: ModelFacts, context: int, grammar: str = ""
) -> dict[str, Any]:
    check_prompt(ids, facts.vocabulary)
    params = {**sampling_params(request, len(ids), facts, context), **steering_params(request, facts)}
    return {"kind": "generate", "prompt_ids": ids, "params": params | ({"grammar": grammar} if grammar else {})}


def sampling_params(request: Sampling, prompt: int, facts: ModelFacts, context: int) -> dict[str, Any]:
    """A seed that wasn't given is drawn here and kept in the payload, so that a second attempt repeats the first."""
    defaults = facts.defaults
    top_p = chosen(request.top_p, defaults.get("top_p"), 1.0)
    return {
        "max_tokens": completion_budget(prompt, request.token_limit, context),
        "temperature": float(chosen(request.temperature, defaults.get("temperature"), 1.0)),
        "top_p": max(float(top_p), MIN_TOP_P),
        "top_k": max(int(chosen(request.top_k, defaults.get("top_k"), 0)), 0),
        "min_p": float(chosen(request.min_p, defaults.get("min_p"), 0.0)),
        "seed": secrets.randbits(63) if request.seed is None else request.seed,
        "stop": request.stop_strings,
        "stop_token_ids": [] if request.ignore_eos else list(facts.stop_ids),
        "ignore_eos": request.ignore_eos,
        "include_stop": request.include_stop_str_in_output,
    }


def steering_params(request: Sampling, facts: ModelFacts) -> dict[str, Any]:
    """Only what was asked for: plain requests stay small, and are sampled the fast way."""
    penalties = {
        "presence_penalty": float(request.presence_penalty or 0),
        "frequency_penalty": float(request.frequency_penalty or 0),
        "repetition_penalty": float(chosen(request.repetition_penalty, facts.defaults.get("repetition_penalty"), 1)),
    }
    params: dict[str, Any] = {name: value for name, value in penalties.items() if value != NEUTRAL[name]}
    if request.logit_bias:
        params["logit_bias"] = biases(request.logit_bias, facts.vocabulary)
    if request.logprobs_count is not None:
        params["logprobs"] = request.logprobs_count
    return params | ({"n": request.choices} if request.choices > 1 else {})


def biases(asked: Mapping[str, float], vocabulary: int) -> list[tuple[int, float]]:
    for token in asked:
        if not token.isascii() or not token.isdecimal() or len(token) > MOST_DIGITS or int(token) >= vocabulary:
            raise bad_request(f"'logit_bias' names {token!r}, not a token id below {vocabulary}.", param="logit_bias")
    pairs = {int(token): float(bias) for token, bias in asked.items()}
    return list(pairs.items())


def chosen(asked: float | None, default: float | None, otherwise: float) -> float:
    if asked is not None:
        return asked
    return otherwise if default is None else default


def estimated_cost(payload: Mapping[str, Any]) -> float:
    """Prompt tokens plus twice the completion tokens (VTC's weights); an open-ended request counts as a usual one.

    Corrected by the actual number when the job is done.
    """
    expected = min(payload["params"]["max_tokens"], EXPECTED_COMPLETION)
    return len(payload["prompt_ids"]) + DECODE_WEIGHT * expected * payload["params"].get("n", 1)
