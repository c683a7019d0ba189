"""What is asked of the engine and what it answers, step by step."""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from stoker.runtime.pool.meter import Charge

if TYPE_CHECKING:
    from stoker.runtime.adapters.adapter_file import AdapterFile

MAX_BIASES = 1024
MAX_TOP_LOGPROBS = 20

FinishReason = Literal["stop", "length", "abort", "error", "refused"]
"""What is refused is the request's own fault: it can't be run as it is."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off. `max_tokens` counts `prior` tokens too.

    Penalties of 0 (`repetition_penalty`: of 1) are off; the latter also counts the prompt. `logit_bias` pairs tokens
    with what is added to their logits. `logprobs`: of each token and that many likeliest ones (None: of none).
    `grammar` is one of `runtime.grammar`.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    grammar: str = ""

    @property
    def penalised(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def steered(self) -> bool:
        """Whether plain sampling isn't enough."""
        return self.penalised or bool(self.logit_bias) or self.logprobs is not None or bool(self.grammar)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingParams":
        unknown = set(values) - {f.name for f in fields(cls)}
        require(not unknown, f"unknown sampling parameter(s): {', '.join(sorted(unknown))}")
        require("max_tokens" in values, "max_tokens is missing")
        lists = {
            "stop_token_ids": tuple(values.get("stop_token_ids", ())),
            "logit_bias": tuple((token, bias) for token, bias in values.get("logit_bias", ())),
        }
        return cls(**{**values, **lists})


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """`prior` holds tokens that an earlier attempt already produced: generation goes on after them, exactly as if it
    had never stopped. Prefix-cache entries are shared only between requests with equal `cache_salt`.
    The first `public_tokens` of the prompt are no secret: their entries are shared between all requests.
    `patient` requests have what others leave. Without an `adapter`, the model itself answers."""

    id: str
    prompt: Sequence[int]
    params: SamplingParams
    prior: Sequence[int] = field(default_factory=list)
    cache_salt: bytes = b""
    patient: bool = False
    public_tokens: int = 0
    adapter: "AdapterFile | None" = None

    @property
    def tenant(self) -> str:
        """Whoever shares cached prompts is one tenant."""
        return self.cache_salt.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """Texts as token ids; one vector is made of each."""

    id: str
    texts: Sequence[Sequence[int]]


class TokenLogprobs(NamedTuple):
    """Of one token, and of the likeliest ones in its place, most likely first."""

    logprob: float
    ids: list[int]
    logprobs: list[float]


class Delta(NamedTuple):
    """New tokens of one request. `cached_tokens` of the `prompt_tokens` came from the prefix cache. `logprobs` has an
    entry for each token if the request asked for them. `vectors` are those of an EmbedRequest, float32[texts, dim].
    `charge`: what the request has had of the device up to now."""

    request_id: str
    tokens: list[int]
    finish_reason: FinishReason | None
    error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    logprobs: Sequence[TokenLogprobs] = ()
    vectors: bytes = b""
    charge: Charge = Charge()


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
    check_steering(params, vocab_size)


def check_steering(params: SamplingParams, vocab_size: int) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        require(is_within(getattr(params, name), -2, 2), f"{name} must be -2 to 2, not {getattr(params, name)!r}")
    require(
        is_within(params.repetition_penalty, 0.01, 100),
        f"repetition_penalty must be 0.01 to 100, not {params.repetition_penalty!r}",
    )
    require(len(params.logit_bias) <= MAX_BIASES, f"logit_bias has more than {MAX_BIASES} entries")
    ids = [token for token, _ in params.logit_bias]
    check_tokens("logit_bias", ids, vocab_size)
    require(len(set(ids)) == len(ids), "logit_bias names a token twice")
    for token, bias in params.logit_bias:
        require(is_within(bias, -100, 100), f"logit_bias of token {token} must be -100 to 100, not {bias!r}")
    wanted = params.logprobs
    require(
        wanted is None or (type(wanted) is int and 0 <= wanted <= MAX_TOP_LOGPROBS),
        f"logprobs must be 0 to {MAX_TOP_LOGPROBS}, not {wanted!r}",
    )
    require(isinstance(params.grammar, str), f"grammar must be a string, not {params.grammar!r}")


def is_within(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and low <= value <= high


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
