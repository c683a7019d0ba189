"""One route: reads the body, runs the handler, and stops it at once when the client goes away."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.datastructures import QueryParams
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from stoker.runtime.gateway.auth import Access, Caller
from stoker.runtime.gateway.body import ClientGone, parse_json, parse_object, read_body
from stoker.runtime.gateway.errors import ApiError, bad_request
from stoker.runtime.gateway.sse import json_bytes
from stoker.runtime.gateway.steps import Watch

if TYPE_CHECKING:
    from stoker.runtime.gateway.context import Gateway

BODY = "http.response.body"
CANCEL_AGAIN_S = 1.0
MOST_DIGITS = 9
EVENT_STREAM = "text/event-stream"
EXCHANGE = "stoker.exchange"
HEADERS = "stoker.headers"
JOB_ID = "stoker.job_id"
PLACE = "stoker.place"
RATES = "stoker.rates"
REPLAYED = "stoker.replayed"
ROUTE = "stoker.route"
ROUTED = "stoker.routed"
STARTED = "stoker.started"
WIRE = "stoker.wire"


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request whose body has been read, with everything a handler may use. Names of headers are lower-case; `started`
    is monotonic seconds."""

    gateway: "Gateway"
    caller: Caller
    scope: Scope
    headers: Mapping[str, str]
    body: bytes
    receive: Receive

    @property
    def started(self) -> float:
        return self.scope[STARTED]

    def path(self, name: str) -> str:
        return self.scope["path_params"][name]

    def query(self, name: str) -> str:
        """A query parameter, "" when there is none."""
        return QueryParams(self.scope["query_string"]).get(name, "")

    def limit(self, usual: int, most: int) -> int:
        """The query's `limit`, `usual` when it has none. Raises ApiError 400."""
        text = self.query("limit") or str(usual)
        if not (text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS and 1 <= int(text) <= most):
            raise bad_request(f"'limit' must be a number from 1 to {most}.", param="limit")
        return int(text)

    def json(self) -> Any:
        """An empty body is null."""
        return parse_json(self.body) if self.body else None

    def object(self) -> dict[str, Any]:
        return parse_object(self.body)

    def about_job(self, job_id: str, *, replayed: bool = False) -> None:
        """From here on the answer carries `x-job-id`, whatever it will be; `replayed`: by an earlier request's job."""
        self.scope[JOB_ID] = job_id
        self.scope[REPLAYED] = replayed


Handler = Callable[[Incoming], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path, and what /openapi.json says about it. `streams_body`: the handler reads the body itself.

    `access` is the scope that a key needs for it. `request` and `answer` are types that pydantic can describe; `others`
    maps further successes to their types, `problems` failures to their meaning, `reads` request headers and `asks`
    query parameters to theirs. With `events`, their data's type, the answer may be a stream of events instead.
    Of one that `packs`, body and answer (not a 202) may be msgpack.
    """

    method: str
    path: str
    handler: Handler
    access: Access
    summary: str
    tag: str
    request: Any = None
    answer: Any = None
    status: int = 200
    others: Mapping[int, Any] = field(default_factory=dict)
    problems: Mapping[int, str] = field(default_factory=dict)
    reads: Mapping[str, str] = field(default_factory=dict)
    asks: Mapping[str, str] = field(default_factory=dict)
    media: str = "application/json"
    events: Any = None
    packs: bool = False
    streams_body: bool = False


class Resource:
    """The ASGI application behind one path: its endpoints by method."""

    def __init__(self, endpoints: list[Endpoint]) -> None:
        self._methods = {endpoint.method: endpoint for endpoint in endpoints}
        get = self._methods.get("GET")
        if get and get.media != EVENT_STREAM:
            self._methods["HEAD"] = get
        self._path = endpoints[0].path
        self._least: Access = "anyone" if any(each.access == "anyone" for each in endpoints) else "invoke"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ROUTE] = self._path
        gateway, headers = scope["app"].state.gateway, scope[HEADERS]
        endpoint = self._methods.get(scope["method"])
        caller = await gateway.doorkeeper.admit(headers, endpoint.access if endpoint else self._least)
        if endpoint is None:
            raise method_not_allowed(scope["method"], self._methods)
        limits = gateway.settings
        if endpoint.streams_body:
            await respond(endpoint, Incoming(gateway, caller, scope, headers, b"", receive), send)
            return
        body = await read_body(scope, receive, limits.max_body_bytes, limits.body_timeout_s)
        incoming = Incoming(gateway, caller, scope, headers, body, no_more_body)
        await while_connected(receive, send, lambda watched: respond(endpoint, incoming, watched))


def method_not_allowed(method: str, allowed: Mapping[str, Endpoint]) -> ApiError:
    return ApiError(
        405,
        f"The method {method} is not allowed here; use {' or '.join(allowed)}.",
        code="method_not_allowed",
        headers={"allow": ", ".join(allowed)},
    )


async def respond(endpoint: Endpoint, incoming: Incoming, send: Send) -> None:
    """A place within the tenant's limits that no job came to use is free again, whatever the reason."""
    try:
        response = await endpoint.handler(incoming)
        if not incoming.scope[EXCHANGE].answered(response):
            await response(incoming.scope, incoming.receive, send)
    finally:
        if place := incoming.scope.pop(PLACE, ""):
            incoming.gateway.background(incoming.gateway.quota.release(incoming.caller.tenant, place))


async def no_more_body() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def while_connected(receive: Receive, send: Send, run: Callable[[Send], Awaitable[None]]) -> None:
    """Runs `run` to its end, or cancels it and raises ClientGone when the client disconnects before the last byte."""
    answer = Answer(send)
    watch = Watch(receive, is_disconnect, answer.strike)
    try:
        await run(answer.send)
    except asyncio.CancelledError:
        if not answer.forgiven():
            raise
        raise ClientGone from None
    finally:
        watch.close()
        answer.over()
    if answer.forgiven():
        raise ClientGone


def is_disconnect(message: Message) -> bool:
    return message["type"] == "http.disconnect"


class Answer:
    """What the current task sends, and the end of that task's work when the client is gone before the last byte."""

    def __init__(self, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._send = send
        self._complete = False
        self._strikes = 0
        self._again: asyncio.TimerHandle | None = None

    async def send(self, message: Message) -> None:
        await self._send(message)
        self._complete = self._complete or (message["type"] == BODY and not message.get("more_body"))

    def strike(self) -> None:
        """Cancels until it helps: before Python 3.12 `asyncio.wait_for`, which redis-py uses, may swallow a cancel."""
        if self._complete:
            return
        self._strikes += 1
        self._task.cancel()
        self._again = self._task.get_loop().call_later(CANCEL_AGAIN_S, self.strike)

    def over(self) -> None:
        if self._again is not None:
            self._again.cancel()

    def forgiven(self) -> bool:
        """Whether it was struck; then those cancellations are answered for, and others stand."""
        struck, self._strikes = self._strikes, 0
        for _ in range(struck):
            self._task.uncancel()
        return struck > 0


class Json(Response):
    """JSON for anything a job can return; see `sse.json_bytes`."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)
