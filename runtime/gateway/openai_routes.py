"""/v1/chat/completions, /v1/completions and /v1/models."""

from collections.abc import Callable
from typing import Any, TypeVar

from starlette.responses import Response

from stoker.coldstart.failures import ColdStartError
from stoker.queue.records import NewJob
from stoker.runtime.gateway.answers import ModelObject
from stoker.runtime.gateway.calls import Call, idempotency_key, new_job, take_place
from stoker.runtime.gateway.endpoint import ROUTED, Incoming, Json
from stoker.runtime.gateway.errors import ApiError, bad_request, not_found
from stoker.runtime.gateway.generation import OVERFLOW, context_limit, estimated_cost, generation_payload
from stoker.runtime.gateway.prompts import PromptEncoder, TemplateRefused, TextTooLong
from stoker.runtime.gateway.public_prefix import public_tokens
from stoker.runtime.gateway.registry import time_of
from stoker.runtime.gateway.routing import routed
from stoker.runtime.gateway.schema import ChatRequest, CompletionRequest, chat_request, completion_request
from stoker.runtime.gateway.serving import serving
from stoker.runtime.gateway.structured import answer_grammar
from stoker.runtime.gateway.token_stream import shape_of, token_stream
from stoker.runtime.spec import FunctionSpec, adapted_name, base_and_adapter, short_name

Ids = TypeVar("Ids", list[int], list[list[int]])


async def chat_completions(incoming: Incoming) -> Response:
    return await generate(incoming, chat_request(incoming.object()))


async def completions(incoming: Incoming) -> Response:
    return await generate(incoming, completion_request(incoming.object()))


async def generate(incoming: Incoming, request: ChatRequest | CompletionRequest) -> Response:
    key = idempotency_key(incoming)
    spec = await language_model(incoming, request, key)
    await take_place(incoming, spec, key)
    job = await generation_job(incoming, spec, request, key=key)
    call = Call(incoming, spec, job)
    if request.stream:
        return token_stream(incoming, call, request)
    async with call:
        outcome = await call.outcome()
    return Json(shape_of(request, call.job_id).whole(outcome.value()))


async def language_model(incoming: Incoming, request: ChatRequest | CompletionRequest, key: str) -> FunctionSpec:
    spec = await base_of(incoming, request.model, "model")
    if spec.kind == "router":
        return await routed(incoming, spec, request, key)
    if spec.kind != "llm":
        raise not_found(f"'{request.model}' is not a language model.", code="model_not_found", param="model")
    return spec


async def base_of(incoming: Incoming, model: str, param: str | None = None) -> FunctionSpec:
    """The function that a model's name means. Raises ApiError 404, also for an adapter that it doesn't have, naming the
    request field `param`."""
    name, adapter = base_and_adapter(model)
    registry = incoming.gateway.registry
    spec = await serving(incoming.gateway, await registry.find(incoming.caller, name, param=param))
    if adapter and adapter not in spec.adapters:
        # Another gateway may have deployed it just now.
        spec = await serving(incoming.gateway, await registry.newest(spec.name))
    if model != adapted_name(name, adapter) or (adapter and adapter not in spec.adapters):
        raise not_found(f"The model '{name}' has no adapter '{adapter}'.", code="model_not_found", param=param)
    return spec


async def generation_job(
    incoming: Incoming,
    spec: FunctionSpec,
    request: ChatRequest | CompletionRequest,
    *,
    key: str = "",
    stream: bool | None = None,
) -> NewJob:
    """Raises ApiError 400 for what the model can't run, 503 while its tokenizer can't be read."""
    encoder = await encoder_of(incoming, spec)
    context = context_limit(spec, encoder.facts)
    ids = await prompt_ids(incoming, encoder, request, context)
    grammar = await answer_grammar(request, encoder.facts.stop_ids)
    payload = generation_payload(request, ids, encoder.facts, context, grammar)
    if adapter := adapter_of(incoming, request.model):
        payload["adapter"] = adapter
    if spec.public_prefix:
        asked = spec, encoder, isinstance(request, ChatRequest), ids
        if public := await incoming.gateway.prompts.run(incoming.caller.tenant, public_tokens, *asked):
            payload["public_tokens"] = public
    streams = bool(request.stream) if stream is None else stream
    return new_job(incoming, spec, payload, key=key, cost=estimated_cost(payload), stream=streams)


def adapter_of(incoming: Incoming, model: str) -> str:
    """What the request names, or the router that it was for."""
    routed = incoming.scope.get(ROUTED)
    return routed[2] if routed else base_and_adapter(model)[1]


async def encoder_of(incoming: Incoming, spec: FunctionSpec) -> PromptEncoder:
    try:
        return await incoming.gateway.prompts.get(spec)
    except ColdStartError as error:
        message = f"The tokenizer of '{short_name(spec.name)}' can't be read: {error}."
        raise ApiError(503, message, type="cold_start_error", code=type(error).__name__) from error
    except TemplateRefused as refusal:
        raise bad_request(f"The model's chat template refused the messages: {refusal}.", param="model") from None


async def prompt_ids(
    incoming: Incoming, encoder: PromptEncoder, request: ChatRequest | CompletionRequest, context: int
) -> list[int]:
    if isinstance(request, CompletionRequest):
        prompt = request.single_prompt
        if isinstance(prompt, list):
            return prompt
        return await tokenised(incoming, "prompt", encoder.text, prompt, context)
    tools = request.offered_tools
    if tools and not encoder.tool_style:
        message = (
            f"The chat template of '{request.model}' has no tool calls (those of Qwen2.5, Qwen3 and Llama 3.x have); "
            "leave 'tools' out or deploy such a model."
        )
        raise bad_request(message, param="tools", code="unsupported_parameter")
    request.use_tools(encoder.tool_style if tools else "")
    try:
        messages = [message.as_template_input() for message in request.messages]
        return await tokenised(incoming, "messages", encoder.chat, messages, tools, context)
    except TemplateRefused as refusal:
        raise bad_request(f"The model's chat template refused the messages: {refusal}.", param="messages") from None


async def tokenised(incoming: Incoming, param: str, work: Callable[..., Ids], *arguments: Any) -> Ids:
    """By a method of an encoder, in the tenant's turn. Raises ApiError 400 for a text that can't fit."""
    try:
        return await incoming.gateway.prompts.run(incoming.caller.tenant, work, *arguments)
    except TextTooLong as error:
        raise bad_request(str(error), param=param, code=OVERFLOW) from None


async def list_models(incoming: Incoming) -> Response:
    functions = (await incoming.gateway.registry.visible(incoming.caller)).values()
    models = [(spec, adapter) for spec in functions if spec.kind != "python" for adapter in ("", *spec.adapters)]
    return Json({"object": "list", "data": [model_object(*model) for model in models]})


async def get_model(incoming: Incoming) -> Response:
    name = incoming.path("model")
    spec = await base_of(incoming, name, "model")
    if spec.kind == "python":
        raise not_found(f"'{name}' is not a model.", code="model_not_found", param="model")
    return Json(model_object(spec, base_and_adapter(name)[1]))


def model_object(spec: FunctionSpec, adapter: str) -> ModelObject:
    """`created`: when it was deployed first."""
    return {
        "id": adapted_name(short_name(spec.name), adapter),
        "object": "model",
        "created": time_of(spec.born),
        "owned_by": spec.app or "stoker",
    }
