"""What is asked of the engine and what it answers, step by step."""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off. `max_tokens` counts `prior` tokens too."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingParams":
        unknown = set(values) - {f.name for f in fields(cls)}
        require(not unknown, f"unknown sampling parameter(s): {', '.join(sorted(unknown))}")
        require("max_tokens" in values, "max_tokens is missing")
        return cls(**{**values, "stop_token_ids": tuple(values.get("stop_token_ids", ()))})


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """`prior` holds tokens that an earlier attempt already produced: generation goes on after them, exactly as if it
    had never stopped. Prefix-cache entries are shared only between requests with equal `cache_salt`."""

    id: str
    prompt: Sequence[int]
    params: SamplingParams
    prior: Sequence[int] = field(default_factory=list)
    cache_salt: bytes = b""


class Delta(NamedTuple):
    """New tokens of one request. `cached_tokens` of the `prompt_tokens` came from the prefix cache."""

    request_id: str
    tokens: list[int]
    finish_reason: FinishReason | None
    error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0


def validate(request: GenerationRequest, vocab_size: int, max_model_len: int) -> None:
    """Raises ValueError for a request that could never run, with the numbers that say why."""
    require(len(request.prompt) > 0, "the prompt is empty")
    for name, tokens in (("prompt", request.prompt), ("prior", request.prior)):
        check_tokens(name, tokens, vocab_size)
    check_params(request.params, vocab_size)
    wanted = len(request.prompt) + request.params.max_tokens
    require(
        wanted <= max_model_len,
        f"prompt ({len(request.prompt)} tokens) plus max_tokens ({request.params.max_tokens}) is {wanted}, "
        f"over the maximum context length of {max_model_len} tokens",
    )
    require(
        len(request.prior) <= request.params.max_tokens,
        f"{len(request.prior)} prior tokens are more than max_tokens ({request.params.max_tokens})",
    )


def check_tokens(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    try:
        ids = array("q", tokens)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{name} must be a list of token ids: {error}") from error
    for token in (min(ids, default=0), max(ids, default=0)):
        require(0 <= token < vocab_size, f"{name} token id {token} is outside 0 to {vocab_size - 1}")


def check_params(params: SamplingParams, vocab_size: int) -> None:
    integers, numbers = ("max_tokens", "top_k", "seed"), ("temperature", "top_p", "min_p")
    for names, kind, called in ((integers, int, "an integer"), (numbers, (int, float), "a number")):
        for name in names:
            value = getattr(params, name)
            require(isinstance(value, kind), f"{name} must be {called}, not {value!r}")
    require(params.max_tokens >= 1, f"max_tokens must be 1 or more, not {params.max_tokens}")
    require(
        math.isfinite(params.temperature) and params.temperature >= 0,
        f"temperature must be 0 or more, not {params.temperature}",
    )
    require(0 < params.top_p <= 1, f"top_p must be above 0 and at most 1, not {params.top_p}")
    require(0 <= params.min_p <= 1, f"min_p must be 0 to 1, not {params.min_p}")
    require(0 <= params.top_k < 2**31, f"top_k must be 0 (off) or more, not {params.top_k}")
    require(-(2**63) <= params.seed < 2**63, f"seed must fit in 64 bits, not {params.seed}")
    check_tokens("stop_token_ids", params.stop_token_ids, vocab_size)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
