"""/v1/chat/completions, /v1/completions and /v1/models."""

from starlette.responses import Response

from stoker.coldstart.failures import ColdStartError
from stoker.queue.records import NewJob
from stoker.runtime.gateway.answers import ModelObject
from stoker.runtime.gateway.calls import Call, idempotency_key, new_job
from stoker.runtime.gateway.endpoint import Incoming, Json
from stoker.runtime.gateway.errors import ApiError, bad_request, not_found
from stoker.runtime.gateway.generation import context_limit, estimated_cost, generation_payload
from stoker.runtime.gateway.prompts import PromptEncoder, TemplateRefused
from stoker.runtime.gateway.schema import ChatRequest, CompletionRequest, chat_request, completion_request
from stoker.runtime.gateway.structured import answer_grammar
from stoker.runtime.gateway.token_stream import shape_of, token_stream
from stoker.runtime.spec import FunctionSpec, short_name


async def chat_completions(incoming: Incoming) -> Response:
    return await generate(incoming, chat_request(incoming.object()))


async def completions(incoming: Incoming) -> Response:
    return await generate(incoming, completion_request(incoming.object()))


async def generate(incoming: Incoming, request: ChatRequest | CompletionRequest) -> Response:
    spec = await language_model(incoming, request.model)
    job = await generation_job(incoming, spec, request, key=idempotency_key(incoming))
    call = Call(incoming, spec, job)
    if request.stream:
        return token_stream(incoming, call, request)
    async with call:
        outcome = await call.outcome()
    return Json(shape_of(request, call.job_id).whole(outcome.value()))


async def language_model(incoming: Incoming, name: str) -> FunctionSpec:
    spec = await incoming.gateway.registry.find(incoming.caller, name, param="model")
    if spec.kind != "llm":
        raise not_found(f"'{name}' is not a language model.", code="model_not_found", param="model")
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
    ids = await prompt_ids(incoming, encoder, request)
    grammar = await answer_grammar(request)
    payload = generation_payload(request, ids, encoder.facts, context_limit(spec, encoder.facts), grammar)
    streams = bool(request.stream) if stream is None else stream
    return new_job(incoming, spec, payload, key=key, cost=estimated_cost(payload), stream=streams)


async def encoder_of(incoming: Incoming, spec: FunctionSpec) -> PromptEncoder:
    try:
        return await incoming.gateway.prompts.get(spec)
    except ColdStartError as error:
        message = f"The tokenizer of '{short_name(spec.name)}' can't be read: {error}."
        raise ApiError(503, message, type="cold_start_error", code=type(error).__name__) from error


async def prompt_ids(incoming: Incoming, encoder: PromptEncoder, request: ChatRequest | CompletionRequest) -> list[int]:
    prompts = incoming.gateway.prompts
    if isinstance(request, CompletionRequest):
        prompt = request.single_prompt
        return prompt if isinstance(prompt, list) else await prompts.text(encoder, prompt)
    tools = request.offered_tools
    if tools and not encoder.tool_style:
        message = (
            f"The chat template of '{request.model}' has no tool calls (those of Qwen2.5, Qwen3 and Llama 3.x have); "
            "leave 'tools' out or deploy such a model."
        )
        raise bad_request(message, param="tools", code="unsupported_parameter")
    request.use_tools(encoder.tool_style if tools else "")
    try:
        return await prompts.chat(encoder, [message.as_template_input() for message in request.messages], tools)
    except TemplateRefused as refusal:
        raise bad_request(f"The model's chat template refused the messages: {refusal}.", param="messages") from None


async def list_models(incoming: Incoming) -> Response:
    functions = (await incoming.gateway.registry.visible(incoming.caller)).values()
    return Json({"object": "list", "data": [model_object(spec) for spec in functions if spec.kind != "python"]})


async def get_model(incoming: Incoming) -> Response:
    name = incoming.path("model")
    spec = await incoming.gateway.registry.find(incoming.caller, name, param="model")
    if spec.kind == "python":
        raise not_found(f"'{name}' is not a model.", code="model_not_found", param="model")
    return Json(model_object(spec))


def model_object(spec: FunctionSpec) -> ModelObject:
    """OpenAI's clients need `created`; when a model was deployed isn't kept, so it is 0."""
    return {"id": short_name(spec.name), "object": "model", "created": 0, "owned_by": spec.app or "stoker"}
