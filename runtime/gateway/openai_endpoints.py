"""The routes that OpenAI's clients call, but for files and batches; vLLM's clients look for `/health` besides."""

from stoker.runtime.gateway import embedding_routes, openai_routes, system_routes
from stoker.runtime.gateway.answers import ChatCompletion, ChatCompletionChunk, Completion, ModelList, ModelObject
from stoker.runtime.gateway.embeddings import EmbeddingList, EmbeddingRequest
from stoker.runtime.gateway.endpoint import Endpoint
from stoker.runtime.gateway.response_routes import RESPONSE_ENDPOINTS
from stoker.runtime.gateway.schema import ChatRequest, CompletionRequest

CALLS = {
    404: "There is no such function.",
    409: "The idempotency key was used with a different body.",
    429: "Too many jobs wait, or the tenant is at one of its limits; see Retry-After.",
    499: "The job was cancelled.",
    504: "A time limit passed.",
}
KEY = {"Idempotency-Key": "The same key and body give the first request's answer; the job then outlives its client."}

OPENAI_ENDPOINTS = [
    Endpoint(
        "POST",
        "/v1/chat/completions",
        openai_routes.chat_completions,
        "invoke",
        "Answer a conversation; a stream of chunks with `stream: true`.",
        "OpenAI",
        request=ChatRequest,
        answer=ChatCompletion,
        events=ChatCompletionChunk,
        problems=CALLS,
        reads=KEY,
    ),
    Endpoint(
        "POST",
        "/v1/completions",
        openai_routes.completions,
        "invoke",
        "Continue a text; without `max_tokens` up to the end of the context.",
        "OpenAI",
        request=CompletionRequest,
        answer=Completion,
        events=Completion,
        problems=CALLS,
        reads=KEY,
    ),
    Endpoint(
        "POST",
        "/v1/embeddings",
        embedding_routes.embeddings,
        "invoke",
        "Unit vectors of texts.",
        "OpenAI",
        request=EmbeddingRequest,
        answer=EmbeddingList,
        problems=CALLS,
        reads=KEY,
    ),
    Endpoint(
        "GET",
        "/v1/models",
        openai_routes.list_models,
        "invoke",
        "Deployed language models.",
        "OpenAI",
        answer=ModelList,
    ),
    Endpoint(
        "GET",
        "/v1/models/{model}",
        openai_routes.get_model,
        "invoke",
        "One language model.",
        "OpenAI",
        answer=ModelObject,
        problems={404: "There is no such model."},
    ),
    *RESPONSE_ENDPOINTS,
    Endpoint(
        "GET",
        "/health",
        system_routes.health,
        "anyone",
        "The same as /healthz, where load generators for vLLM look for it.",
        "OpenAI",
        answer=dict[str, str],
    ),
]
