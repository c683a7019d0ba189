"""One route: reads the body, runs the handler, and stops it at once when the client goes away."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, QueryParams
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from stoker.runtime.gateway.auth import Access, Caller
from stoker.runtime.gateway.body import ClientGone, parse_json, parse_object, read_body
from stoker.runtime.gateway.errors import ApiError, bad_request
from stoker.runtime.gateway.sse import json_bytes

if TYPE_CHECKING:
    from stoker.runtime.gateway.context import Gateway

CANCEL_AGAIN_S = 1.0
MOST_DIGITS = 9
EVENT_STREAM = "text/event-stream"
JOB_ID = "stoker.job_id"
REPLAYED = "stoker.replayed"
ROUTE = "stoker.route"
STARTED = "stoker.started"


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request whose body has been read, with everything a handler may use. `started` is monotonic seconds."""

    gateway: "Gateway"
    caller: Caller
    scope: Scope
    headers: Headers
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
    query parameters to theirs.
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
        gateway, headers = scope["app"].state.gateway, Headers(scope=scope)
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
    response = await endpoint.handler(incoming)
    await response(incoming.scope, incoming.receive, send)


async def no_more_body() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def while_connected(receive: Receive, send: Send, run: Callable[[Send], Coroutine[Any, Any, None]]) -> None:
    """Runs `run` to its end, or cancels it and raises ClientGone when the client disconnects before the last byte."""
    complete = False

    async def watched(message: Message) -> None:
        nonlocal complete
        await send(message)
        complete = complete or (message["type"] == "http.response.body" and not message.get("more_body"))

    work = asyncio.ensure_future(run(watched))
    gone = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done() and not complete:
            raise ClientGone
        await work
    finally:
        await stop(work, gone)


async def stop(*tasks: asyncio.Task[None]) -> None:
    """Cancels until they end: before Python 3.12 `asyncio.wait_for` (redis-py uses it) may swallow a cancellation."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Json(Response):
    """JSON for anything a job can return; see `sse.json_bytes`."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)
