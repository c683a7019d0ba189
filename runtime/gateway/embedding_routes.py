"""/v1/embeddings."""

from starlette.responses import Response

from stoker.queue.records import NewJob
from stoker.runtime.gateway.calls import Call, idempotency_key, new_job, take_place
from stoker.runtime.gateway.embeddings import EmbeddingRequest, embedding_list, embedding_payload, embedding_request
from stoker.runtime.gateway.endpoint import Incoming, Json
from stoker.runtime.gateway.errors import not_found
from stoker.runtime.gateway.generation import context_limit
from stoker.runtime.gateway.openai_routes import encoder_of, tokenised
from stoker.runtime.gateway.serving import serving
from stoker.runtime.spec import FunctionSpec


async def embeddings(incoming: Incoming) -> Response:
    request = embedding_request(incoming.object())
    spec = await embedding_model(incoming, request.model)
    key = idempotency_key(incoming)
    await take_place(incoming, spec, key)
    async with Call(incoming, spec, await embedding_job(incoming, spec, request, key)) as call:
        outcome = await call.outcome()
    return Json(embedding_list(request, outcome.value()))


async def embedding_model(incoming: Incoming, name: str) -> FunctionSpec:
    spec = await serving(incoming.gateway, await incoming.gateway.registry.find(incoming.caller, name, param="model"))
    if spec.kind != "embed":
        raise not_found(f"'{name}' is not an embedding model.", code="model_not_found", param="model")
    return spec


async def embedding_job(incoming: Incoming, spec: FunctionSpec, request: EmbeddingRequest, key: str) -> NewJob:
    """Raises ApiError 400 for what the model can't run, 503 while its tokenizer can't be read."""
    encoder = await encoder_of(incoming, spec)
    context = context_limit(spec, encoder.facts)
    texts = request.token_lists or await tokenised(incoming, "input", encoder.texts, request.strings, context)
    payload = embedding_payload(request, texts, encoder.facts, context)
    return new_job(incoming, spec, payload, key=key, cost=float(sum(map(len, texts))))
