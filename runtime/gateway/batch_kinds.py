"""What a batch can ask for: how each endpoint's body becomes a job, and the job's result an answer."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.queue.records import NewJob
from stoker.runtime.gateway.embedding_routes import embedding_job, embedding_model
from stoker.runtime.gateway.embeddings import embedding_list, embedding_request
from stoker.runtime.gateway.endpoint import Incoming
from stoker.runtime.gateway.openai_routes import generation_job, language_model
from stoker.runtime.gateway.schema import chat_request, completion_request
from stoker.runtime.gateway.token_stream import shape_of


@dataclass(frozen=True, slots=True)
class Kind:
    """`parse` and `job` raise ApiError for what can't be done; `answer` takes request, job id and result."""

    parse: Callable[[Mapping[str, Any]], Any]
    job: Callable[[Incoming, Any, str], Awaitable[NewJob]]
    answer: Callable[[Any, str, Mapping[str, Any]], Any]


def unstreamed(parse: Callable[[dict[str, Any]], Any]) -> Callable[[Mapping[str, Any]], Any]:
    return lambda body: parse({**body, "stream": None, "stream_options": None})


async def generation(incoming: Incoming, request: Any, key: str) -> NewJob:
    spec = await language_model(incoming, request, key)
    return await generation_job(incoming, spec, request, key=key, stream=False)


async def embedding(incoming: Incoming, request: Any, key: str) -> NewJob:
    return await embedding_job(incoming, await embedding_model(incoming, request.model), request, key)


def generated(request: Any, job_id: str, result: Mapping[str, Any]) -> Any:
    return shape_of(request, job_id).whole(result)


KINDS = {
    "/v1/chat/completions": Kind(unstreamed(chat_request), generation, generated),
    "/v1/completions": Kind(unstreamed(completion_request), generation, generated),
    "/v1/embeddings": Kind(embedding_request, embedding, lambda request, _, result: embedding_list(request, result)),
}
