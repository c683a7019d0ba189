"""Pure half of the language-model routes: a request becomes a job payload, a job's result becomes OpenAI's answer."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.runtime.gateway.errors import ApiError, bad_request
from stoker.runtime.gateway.prompts import ModelFacts
from stoker.runtime.gateway.schema import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Delta,
    Sampling,
    Usage,
)
from stoker.runtime.spec import FunctionSpec

MIN_TOP_P = 1e-6
EXPECTED_COMPLETION = 256
DECODE_WEIGHT = 2.0


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


def generation_payload(request: Sampling, ids: list[int], facts: ModelFacts, context: int) -> dict[str, Any]:
    check_prompt(ids, facts.vocabulary)
    return {"kind": "generate", "prompt_ids": ids, "params": sampling_params(request, len(ids), facts, context)}


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


def chosen(asked: float | None, default: float | None, otherwise: float) -> float:
    if asked is not None:
        return asked
    return otherwise if default is None else default


def estimated_cost(payload: Mapping[str, Any]) -> float:
    """Prompt tokens plus twice the completion tokens (VTC's weights); an open-ended request counts as a usual one.

    Corrected by the actual number when the job is done.
    """
    expected = min(payload["params"]["max_tokens"], EXPECTED_COMPLETION)
    return len(payload["prompt_ids"]) + DECODE_WEIGHT * expected


def usage_object(usage: Mapping[str, Any]) -> Usage:
    prompt, completion = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": int(usage.get("cached_tokens") or 0)},
    }


class ChatShape:
    """Builds the objects of one /v1/chat/completions answer."""

    def __init__(self, job_id: str, model: str, created: int, include_usage: bool = False) -> None:
        self._head = {"id": f"chatcmpl-{job_id}", "created": created, "model": model}
        self._tail: dict[str, Any] = {"usage": None} if include_usage else {}

    def whole(self, result: Mapping[str, Any]) -> ChatCompletion:
        message = {"role": "assistant", "content": result["text"], "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": result["finish_reason"]}
        body = {"object": "chat.completion", "choices": [choice], "usage": usage_object(result["usage"])}
        return {**self._head, **body}  # type: ignore[return-value]

    def first(self) -> ChatCompletionChunk | None:
        return self._chunk({"role": "assistant", "content": ""}, None)

    def text(self, text: str) -> ChatCompletionChunk:
        return self._chunk({"content": text}, None)

    def last(self, finish_reason: str) -> ChatCompletionChunk:
        return self._chunk({}, finish_reason)

    def usage(self, usage: Mapping[str, Any]) -> ChatCompletionChunk:
        body = {"object": "chat.completion.chunk", "choices": [], "usage": usage_object(usage)}
        return {**self._head, **body}  # type: ignore[return-value]

    def _chunk(self, delta: Delta, finish_reason: str | None) -> ChatCompletionChunk:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **self._tail}  # type: ignore[return-value]


class CompletionShape:
    """Builds the objects of one /v1/completions answer."""

    def __init__(self, job_id: str, model: str, created: int, include_usage: bool = False) -> None:
        self._head = {"id": f"cmpl-{job_id}", "object": "text_completion", "created": created, "model": model}
        self._tail: dict[str, Any] = {"usage": None} if include_usage else {}

    def whole(self, result: Mapping[str, Any]) -> Completion:
        choices = self._choices(result["text"], result["finish_reason"])
        return {**self._head, "choices": choices, "usage": usage_object(result["usage"])}  # type: ignore[return-value]

    def first(self) -> Completion | None:
        return None

    def text(self, text: str) -> Completion:
        return {**self._head, "choices": self._choices(text, None), **self._tail}  # type: ignore[return-value]

    def last(self, finish_reason: str) -> Completion:
        return {**self._head, "choices": self._choices("", finish_reason), **self._tail}  # type: ignore[return-value]

    def usage(self, usage: Mapping[str, Any]) -> Completion:
        return {**self._head, "choices": [], "usage": usage_object(usage)}  # type: ignore[return-value]

    def _choices(self, text: str, finish_reason: str | None) -> list[dict[str, Any]]:
        return [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}]


Shape = ChatShape | CompletionShape
