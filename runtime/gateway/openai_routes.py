"""/v1/chat/completions, /v1/completions and /v1/models."""

import time
from collections.abc import AsyncGenerator

from starlette.responses import Response

from stoker.coldstart.failures import ColdStartError
from stoker.queue.events import Event
from stoker.queue.records import NewJob, unpack
from stoker.runtime.gateway import sse
from stoker.runtime.gateway.calls import Call, idempotency_key, new_job
from stoker.runtime.gateway.endpoint import Incoming, Json
from stoker.runtime.gateway.errors import ApiError, bad_request, not_found
from stoker.runtime.gateway.event_stream import EventStream
from stoker.runtime.gateway.generation import (
    ChatShape,
    CompletionShape,
    Shape,
    context_limit,
    estimated_cost,
    generation_payload,
)
from stoker.runtime.gateway.metrics import TokenClock
from stoker.runtime.gateway.prompts import PromptEncoder, TemplateRefused
from stoker.runtime.gateway.schema import (
    ChatRequest,
    CompletionRequest,
    ModelObject,
    Sampling,
    chat_request,
    completion_request,
)
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
    payload = generation_payload(request, ids, encoder.facts, context_limit(spec, encoder.facts))
    streams = bool(request.stream) if stream is None else stream
    return new_job(incoming, spec, payload, key=key, cost=estimated_cost(payload), stream=streams)


async def encoder_of(incoming: Incoming, spec: FunctionSpec) -> PromptEncoder:
    try:
        return await incoming.gateway.prompts.get(spec)
    except ColdStartError as error:
        message = f"The tokenizer of '{spec.name}' can't be read: {error}."
        raise ApiError(503, message, type="cold_start_error", code=type(error).__name__) from error


async def prompt_ids(incoming: Incoming, encoder: PromptEncoder, request: ChatRequest | CompletionRequest) -> list[int]:
    prompts = incoming.gateway.prompts
    if isinstance(request, CompletionRequest):
        prompt = request.single_prompt
        return prompt if isinstance(prompt, list) else await prompts.text(encoder, prompt)
    try:
        return await prompts.chat(encoder, [message.as_template_input() for message in request.messages])
    except TemplateRefused as refusal:
        raise bad_request(f"The model's chat template refused the messages: {refusal}.", param="messages") from None


def shape_of(request: Sampling, job_id: str) -> Shape:
    kind = ChatShape if isinstance(request, ChatRequest) else CompletionShape
    return kind(job_id, request.model, int(time.time()), request.include_usage)


def token_stream(incoming: Incoming, call: Call, request: Sampling) -> Response:
    tokens = TokenFrames(incoming, call, request)
    return EventStream(incoming.gateway, call, tokens.frames(), tokens.piece)


class TokenFrames:
    """Every visible piece of text as a chunk. A second attempt continues the text, so `retry` events need no mark."""

    def __init__(self, incoming: Incoming, call: Call, request: Sampling) -> None:
        self._call = call
        self._request = request
        self._clock = TokenClock(incoming.gateway.metrics, call.function, incoming.started)
        self._text: sse.TextEvent | None = None
        self._sent = 0

    async def frames(self) -> AsyncGenerator[bytes, None]:
        async with self._call as call:
            shape, usage = shape_of(self._request, call.job_id), {}
            self._text = sse.TextEvent(shape.text)
            async for event in call:
                text, reason = "", None
                if event.kind == "chunk":
                    text = self._text_of(event)
                elif event.kind == "end":
                    result = (await call.outcome_at(event)).value()
                    text, reason, usage = result["text"][self._sent :], result["finish_reason"], result["usage"]
                if self._sent == 0 and (text or reason) and (first := shape.first()):
                    yield sse.event(first)
                if text:
                    yield self._filled(text, event.id)
                if reason:
                    yield sse.event(shape.last(reason))
            if self._request.include_usage:
                yield sse.event(shape.usage(usage))
            yield sse.DONE

    def piece(self, event: Event) -> bytes:
        """Of a chunk behind the first frame."""
        text = self._text_of(event)
        return self._filled(text, event.id) if text else b""

    def _text_of(self, event: Event) -> str:
        chunk = unpack(event.data)
        self._clock.tick(len(chunk["ids"]))
        return chunk["text"]

    def _filled(self, text: str, id: str) -> bytes:
        assert self._text is not None
        self._sent += len(text)
        return self._text.fill(text, id)


async def list_models(incoming: Incoming) -> Response:
    functions = (await incoming.gateway.registry.visible(incoming.caller)).values()
    return Json({"object": "list", "data": [model_object(spec) for spec in functions if spec.kind == "llm"]})


async def get_model(incoming: Incoming) -> Response:
    return Json(model_object(await language_model(incoming, incoming.path("model"))))


def model_object(spec: FunctionSpec) -> ModelObject:
    """OpenAI's clients need `created`; when a model was deployed isn't kept, so it is 0."""
    return {"id": short_name(spec.name), "object": "model", "created": 0, "owned_by": spec.app or "stoker"}
