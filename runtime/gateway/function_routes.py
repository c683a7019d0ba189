"""Calling a function: POST /v1/functions/{name} and its jobs. Language models take the bodies of OpenAI's routes."""

import asyncio
import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from stoker.queue.records import JobState, NewJob
from stoker.runtime.gateway.calls import Call, enqueue, idempotency_key, new_job, own_id_key
from stoker.runtime.gateway.context import Gateway
from stoker.runtime.gateway.embedding_routes import embedding_job
from stoker.runtime.gateway.embeddings import EmbeddingRequest, embedding_list, embedding_request
from stoker.runtime.gateway.endpoint import EVENT_STREAM, Incoming, Json
from stoker.runtime.gateway.errors import bad_request
from stoker.runtime.gateway.event_stream import EventStream
from stoker.runtime.gateway.job_events import event_frame, event_frames
from stoker.runtime.gateway.job_object import location, submitted_object
from stoker.runtime.gateway.openai_routes import generation_job
from stoker.runtime.gateway.schema import ChatRequest, CompletionRequest, chat_request, completion_request
from stoker.runtime.gateway.token_stream import shape_of
from stoker.runtime.spec import FunctionSpec, short_name

CLIENT_JOB_ID = re.compile(r"[A-Za-z0-9._~-]{1,128}")
WAIT = re.compile(r"wait=(\d{1,9})")

ModelRequest = ChatRequest | CompletionRequest | EmbeddingRequest


async def invoke(incoming: Incoming) -> Response:
    spec = await incoming.gateway.registry.find(incoming.caller, incoming.path("name"))
    request = model_request(incoming, spec)
    wait_s = preferred_wait(incoming)
    streams = EVENT_STREAM in incoming.headers.get("accept", "")
    job = await function_job(
        incoming, spec, request, key=idempotency_key(incoming), stream=streams or wait_s is not None
    )
    if wait_s == 0:
        return await submit(incoming, job, "respond-async")
    call = Call(incoming, spec, job)
    if streams:
        return EventStream(incoming.gateway, call, event_frames(call), event_frame)
    return await answer(incoming.gateway, call, request, wait_s)


async def answer(gateway: Gateway, call: Call, request: ModelRequest | None, wait_s: float | None) -> Response:
    async with call:
        try:
            async with asyncio.timeout(wait_s):
                outcome = await call.outcome()
        except TimeoutError:
            call.detach()
            job = await call.job()
            reason = (await gateway.view.snapshot()).why_waiting(job)
            return accepted(job.id, job.state, f"wait={wait_s:g}", reason)
    result = outcome.value()
    return Json(answered(request, call.job_id, result) if request else result["value"])


def answered(request: ModelRequest, job_id: str, result: Mapping[str, Any]) -> Any:
    if isinstance(request, EmbeddingRequest):
        return embedding_list(request, result)
    return shape_of(request, job_id).whole(result)


async def post_job(incoming: Incoming) -> Response:
    return await queue_job(incoming, idempotency_key(incoming))


async def put_job(incoming: Incoming) -> Response:
    client_id = incoming.path("id")
    if not CLIENT_JOB_ID.fullmatch(client_id):
        raise bad_request("A job id of your own is 1 to 128 of letters, digits, '.', '_', '~' and '-'.", param="id")
    return await queue_job(incoming, own_id_key(client_id))


async def queue_job(incoming: Incoming, key: str) -> Response:
    """Chunks are kept, so that the job can be followed from its start at any time."""
    spec = await incoming.gateway.registry.find(incoming.caller, incoming.path("name"))
    job = await function_job(incoming, spec, model_request(incoming, spec), key=key, stream=True)
    return await submit(incoming, job)


async def submit(incoming: Incoming, job: NewJob, preference: str = "") -> Response:
    enqueued = await enqueue(incoming.gateway, incoming.caller.account, job)
    incoming.about_job(enqueued.job_id, replayed=not enqueued.created)
    return accepted(enqueued.job_id, enqueued.state, preference)


def accepted(job_id: str, state: JobState, preference: str, reason: str = "") -> Response:
    headers = {"location": location(job_id)} | ({"preference-applied": preference} if preference else {})
    return Json(submitted_object(job_id, state, reason), status_code=202, headers=headers)


async def function_job(
    incoming: Incoming, spec: FunctionSpec, request: ModelRequest | None, *, key: str, stream: bool
) -> NewJob:
    if isinstance(request, EmbeddingRequest):
        return await embedding_job(incoming, spec, request, key)
    if request is not None:
        return await generation_job(incoming, spec, request, key=key, stream=stream)
    return new_job(incoming, spec, {"kind": "call", "input": incoming.json()}, key=key, stream=stream)


def model_request(incoming: Incoming, spec: FunctionSpec) -> ModelRequest | None:
    """What the body asks of a model. How the answer is delivered is the headers' business here."""
    if spec.kind == "python":
        return None
    if spec.kind == "embed":
        return embedding_request({**incoming.object(), "model": short_name(spec.name)})
    fields = {**incoming.object(), "model": short_name(spec.name), "stream": None, "stream_options": None}
    if "messages" in fields:
        return chat_request(fields)
    if "prompt" in fields:
        return completion_request(fields)
    raise bad_request("A language model needs 'messages' or 'prompt'.", param="messages")


def preferred_wait(incoming: Incoming) -> float | None:
    """Seconds until the answer becomes 202 (RFC 7240): None waits for the result, 0 doesn't wait."""
    prefer = incoming.headers.get("prefer", "").replace(" ", "").lower()
    if found := WAIT.search(prefer):
        return float(found[1])
    return 0.0 if "respond-async" in prefer else None
