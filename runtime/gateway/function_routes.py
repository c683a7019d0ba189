"""Calling a function: POST /v1/functions/{name} and its jobs. Language models take the bodies of OpenAI's routes."""

import asyncio
import re
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

from starlette.responses import Response

from stoker.queue.records import JobState, NewJob
from stoker.runtime.gateway.call_input import call_input
from stoker.runtime.gateway.calling_jobs import why_waits
from stoker.runtime.gateway.calls import Call, enqueue, idempotency_key, new_job, own_id_key, take_place
from stoker.runtime.gateway.embedding_routes import embedding_job
from stoker.runtime.gateway.embeddings import EmbeddingRequest, embedding_list, embedding_request
from stoker.runtime.gateway.endpoint import EVENT_STREAM, Incoming, Json
from stoker.runtime.gateway.errors import ApiError, bad_request
from stoker.runtime.gateway.event_stream import EventStream
from stoker.runtime.gateway.job_end import preferred_wait, until_ended
from stoker.runtime.gateway.job_events import event_frame, event_frames
from stoker.runtime.gateway.job_object import location, submitted_object
from stoker.runtime.gateway.job_routes import described, own_job_of
from stoker.runtime.gateway.letting_go import GatewayStops
from stoker.runtime.gateway.media import answer_in, shown_in, value_in
from stoker.runtime.gateway.openai_routes import base_of, generation_job
from stoker.runtime.gateway.routing import routed
from stoker.runtime.gateway.schema import ChatRequest, CompletionRequest, Sampling, chat_request, completion_request
from stoker.runtime.gateway.serving import serving
from stoker.runtime.gateway.token_stream import shape_of
from stoker.runtime.payloads import size_of
from stoker.runtime.spec import FunctionSpec, short_name

CLIENT_JOB_ID = re.compile(r"[A-Za-z0-9._~-]{1,128}")

ModelRequest = ChatRequest | CompletionRequest | EmbeddingRequest


async def invoke(incoming: Incoming) -> Response:
    key = idempotency_key(incoming)
    spec, request = await called(incoming, key)
    wait_s = preferred_wait(incoming)
    streams = EVENT_STREAM in incoming.headers.get("accept", "")
    job = await function_job(incoming, spec, request, key=key, stream=streams or wait_s is not None)
    if wait_s == 0:
        return await submit(incoming, job, "respond-async")
    call = Call(incoming, spec, job)
    if streams:
        show = shown_in(incoming.headers)
        return EventStream(incoming.gateway, call, event_frames(call, show), partial(event_frame, show=show))
    return await answer(incoming, call, request, wait_s)


async def answer(incoming: Incoming, call: Call, request: ModelRequest | None, wait_s: float | None) -> Response:
    async with call:
        try:
            async with nullcontext() if wait_s is None else asyncio.timeout(wait_s):
                outcome = await call.outcome()
        except (TimeoutError, GatewayStops):
            if wait_s is None:
                raise
            call.detach()
            job = await call.job()
            view = await incoming.gateway.view.snapshot()
            reason = await why_waits(incoming.gateway.broker, view, job)
            return accepted(job.id, job.state, f"wait={wait_s:g}", reason)
    result = outcome.value()
    if request is None:
        return await value_in(incoming.headers, result["value"], outcome.size)
    return Json(answered(request, call.job_id, result))


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
    return await queue_job(incoming, own_id_key(incoming, client_id))


async def queue_job(incoming: Incoming, key: str) -> Response:
    """Chunks are kept, so that the job can be followed from its start at any time."""
    spec, request = await called(incoming, key)
    job = await function_job(incoming, spec, request, key=key, stream=True)
    return await submit(incoming, job, wait_s=preferred_wait(incoming) or 0.0)


async def called(incoming: Incoming, key: str) -> tuple[FunctionSpec, ModelRequest | None]:
    spec = await base_of(incoming, incoming.path("name"))
    request = model_request(incoming, spec)
    if isinstance(request, Sampling) and spec.kind == "router":
        spec = await routed(incoming, spec, request, key)
    return spec, request


async def submit(incoming: Incoming, job: NewJob, preference: str = "", wait_s: float = 0.0) -> Response:
    enqueued = await enqueue(incoming, job)
    incoming.about_job(enqueued.job_id, replayed=not enqueued.created)
    if wait_s:
        await until_ended(incoming.gateway, enqueued.job_id, wait_s)
        ended = await own_job_of(incoming, enqueued.job_id)
        record = await described(incoming, ended)
        if record["finished_at"] is not None:
            return await answer_in(incoming.headers, record, size_of(ended.result or b""))
        return accepted(enqueued.job_id, record["state"], f"wait={wait_s:g}", record["wait_reason"] or "")
    return accepted(enqueued.job_id, enqueued.state, preference)


def accepted(job_id: str, state: JobState, preference: str, reason: str = "") -> Response:
    headers = {"location": location(job_id)} | ({"preference-applied": preference} if preference else {})
    return Json(submitted_object(job_id, state, reason), status_code=202, headers=headers)


async def function_job(
    incoming: Incoming, spec: FunctionSpec, request: ModelRequest | None, *, key: str, stream: bool
) -> NewJob:
    if request is not None:
        await take_place(incoming, spec, key)
    if isinstance(request, EmbeddingRequest):
        return await embedding_job(incoming, spec, request, key)
    if request is not None:
        return await generation_job(incoming, spec, request, key=key, stream=stream)
    spec, value = await checked(incoming, spec)
    return new_job(incoming, spec, {"kind": "call", "input": value}, key=key, stream=stream)


async def checked(incoming: Incoming, spec: FunctionSpec) -> tuple[FunctionSpec, Any]:
    """The input, and the version that takes it: what doesn't fit may be for one that another gateway just deployed."""
    gateway = incoming.gateway
    try:
        return spec, await call_input(incoming, gateway.inputs, spec)
    except ApiError:
        newest = await serving(gateway, await gateway.registry.newest(spec.name))
        if newest.kind != spec.kind or newest.version == spec.version:
            raise
        return newest, await call_input(incoming, gateway.inputs, newest)


def model_request(incoming: Incoming, spec: FunctionSpec) -> ModelRequest | None:
    """What the body asks of a model. How the answer is delivered is the headers' business here."""
    if spec.kind == "python":
        return None
    if spec.kind == "embed":
        return embedding_request({**incoming.object(), "model": short_name(spec.name)})
    fields = {**incoming.object(), "model": incoming.path("name"), "stream": None, "stream_options": None}
    if "messages" in fields:
        return chat_request(fields)
    if "prompt" in fields:
        return completion_request(fields)
    raise bad_request("A language model needs 'messages' or 'prompt'.", param="messages")
