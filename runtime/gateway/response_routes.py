"""/v1/responses: a chat request in the words of OpenAI's newer interface, with conversations that are kept."""

import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import Response

from stoker.queue.events import Event
from stoker.queue.records import unpack
from stoker.runtime.gateway import sse
from stoker.runtime.gateway.calls import Call, idempotency_key, take_place, was_queued
from stoker.runtime.gateway.endpoint import Endpoint, Incoming, Json
from stoker.runtime.gateway.errors import ApiError, not_found
from stoker.runtime.gateway.event_stream import EventStream
from stoker.runtime.gateway.metrics import TokenClock
from stoker.runtime.gateway.openai_routes import generation_job, language_model
from stoker.runtime.gateway.response_objects import DeletedResponse, ResponseEvent, ResponseObject
from stoker.runtime.gateway.response_schema import Item, ResponseRequest, as_chat, response_request
from stoker.runtime.gateway.response_shelf import ResponseShelf, StoredResponse
from stoker.runtime.gateway.response_writer import Events, ResponseWriter, response_object
from stoker.runtime.gateway.schema import ChatRequest
from stoker.runtime.gateway.shapes import choices_of

ELSEWHERE = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}


async def post_response(incoming: Incoming) -> Response:
    request = response_request(incoming.object())
    key = idempotency_key(incoming)
    before = await earlier(incoming, request)
    conversation = None if before is None else [*before, *request.items]
    try:
        chat = as_chat(request, conversation or request.items)
        spec = await language_model(incoming, chat, key)
        if before is None and not await was_queued(incoming.gateway, spec.name, incoming.caller.tenant, key):
            raise previous_not_found(request)
        await take_place(incoming, spec, key)
        job = await generation_job(incoming, spec, chat, key=key)
    except ApiError as error:
        raise in_other_words(error) from None
    call = Call(incoming, spec, job)
    telling = Telling(incoming, call, request, chat, conversation, spec.limits.retention_s)
    if request.stream:
        return EventStream(incoming.gateway, call, telling.frames(), telling.piece)
    async with call:
        outcome = await call.outcome()
        response = await telling.whole(outcome.value())
    return Json(response)


async def earlier(incoming: Incoming, request: ResponseRequest) -> list[Item] | None:
    """The conversation that the request goes on from; None when it isn't kept, which is no matter to a request that
    was answered before under its key."""
    if request.previous_response_id is None:
        return []
    found = await shelf(incoming).get(incoming.caller.account, request.previous_response_id)
    return found and found.conversation


def previous_not_found(request: ResponseRequest) -> ApiError:
    message = f"Previous response with id '{request.previous_response_id}' not found: it may no longer be kept."
    return not_found(message, code="previous_response_not_found", param="previous_response_id")


def in_other_words(error: ApiError) -> ApiError:
    """What a chat request is told, with the name that its field has here."""
    if error.param:
        root, dot, rest = error.param.partition(".")
        error.param = ELSEWHERE[root] if root in ELSEWHERE else root + dot + rest
    return error


def shelf(incoming: Incoming) -> ResponseShelf:
    return ResponseShelf(incoming.gateway.redis)


class Telling:
    """One response, told as a stream of events or whole, and kept before its end is told."""

    def __init__(
        self,
        incoming: Incoming,
        call: Call,
        request: ResponseRequest,
        chat: ChatRequest,
        conversation: list[Item] | None,
        kept_s: float,
    ) -> None:
        self._incoming = incoming
        self._call = call
        self._request = request
        self._chat = chat
        self._conversation = conversation
        self._kept_s = kept_s
        self._clock = TokenClock(incoming.gateway.metrics, call.function, incoming.started)
        self._writer: ResponseWriter | None = None
        self._told = self._logprobs = 0

    async def whole(self, result: dict[str, Any]) -> ResponseObject:
        self._begin()
        self._end(result)
        return await self._kept()

    async def frames(self) -> AsyncGenerator[bytes, None]:
        async with self._call as call:
            async for event in call:
                if event.kind == "chunk":
                    if piece := self.piece(event):
                        yield piece
                elif event.kind == "end":
                    result = (await call.outcome_at(event)).value()
                    events = self._begin() + self._end(result)
                    await self._kept()
                    yield framed(events)

    def piece(self, event: Event) -> bytes:
        """Of a chunk; empty when there is nothing to show."""
        chunk = unpack(event.data)
        self._clock.tick(len(chunk["ids"]))
        text, entries = chunk["text"], chunk.get("logprobs")
        if not text and not entries:
            return b""
        self._told += len(text)
        self._logprobs += len(entries or ())
        events = self._begin()
        return framed(events) + framed(self._written.piece(text, entries))

    @property
    def _written(self) -> ResponseWriter:
        assert self._writer is not None
        return self._writer

    def _begin(self) -> Events:
        """Nothing the second time. Not before there is something to tell: until then the job can be another's."""
        if self._writer is not None:
            return []
        begun = response_object(self._request, f"resp_{self._call.job_id}", int(time.time()))
        self._writer = ResponseWriter(begun, self._chat.tool_style)
        return self._writer.begin()

    def _end(self, result: dict[str, Any]) -> Events:
        """Of what is told what is missing yet, and the end."""
        (choice,) = choices_of(result)
        entries = (choice.get("logprobs") or [])[self._logprobs :]
        events = self._written.piece(choice["text"][self._told :], entries)
        return events + self._written.end(choice["finish_reason"], result["usage"])

    async def _kept(self) -> ResponseObject:
        response = self._written.response
        if self._request.keeps and self._conversation is not None:
            stored = StoredResponse(response, [*self._conversation, *map(dict, response["output"])])
            await shelf(self._incoming).put(self._incoming.caller.account, stored, self._kept_s)
        return response


def framed(events: Events) -> bytes:
    return b"".join(sse.event(event, name=event["type"]) for event in events)


async def get_response(incoming: Incoming) -> Response:
    found = await shelf(incoming).get(incoming.caller.account, incoming.path("id"))
    if found is None:
        raise response_not_found(incoming.path("id"))
    return Json(found.response)


async def delete_response(incoming: Incoming) -> Response:
    if not await shelf(incoming).remove(incoming.caller.account, incoming.path("id")):
        raise response_not_found(incoming.path("id"))
    return Json({"id": incoming.path("id"), "object": "response", "deleted": True})


def response_not_found(response_id: str) -> ApiError:
    return not_found(f"There is no response '{response_id}'.", code="response_not_found", param="id")


NO_RESPONSE = {404: "There is no such response, it was made with `store: false`, or it is no longer kept."}
CALL = {
    404: "There is no such model or previous response.",
    409: "The idempotency key was used with a different body.",
    429: "Too many jobs wait, or the tenant is at one of its limits; see Retry-After.",
    499: "The job was cancelled.",
    504: "A time limit passed.",
}

RESPONSE_ENDPOINTS = [
    Endpoint(
        "POST",
        "/v1/responses",
        post_response,
        "invoke",
        "Answer a conversation; a stream of OpenAI's events with `stream: true`.",
        "OpenAI",
        request=ResponseRequest,
        answer=ResponseObject,
        events=ResponseEvent,
        problems=CALL,
        reads={"Idempotency-Key": "The same key and body give the first request's answer."},
    ),
    Endpoint(
        "GET",
        "/v1/responses/{id}",
        get_response,
        "invoke",
        "A response that was kept.",
        "OpenAI",
        answer=ResponseObject,
        problems=NO_RESPONSE,
    ),
    Endpoint(
        "DELETE",
        "/v1/responses/{id}",
        delete_response,
        "invoke",
        "Forget a response.",
        "OpenAI",
        answer=DeletedResponse,
        problems=NO_RESPONSE,
    ),
]
