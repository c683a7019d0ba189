"""What every answer has, whatever happened below: request id, job id, the shape of errors, a count in the metrics."""

import logging
import random
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from redis.exceptions import RedisError, ResponseError
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker.queue.retry import AWAY
from stoker.runtime.gateway.body import ClientGone
from stoker.runtime.gateway.endpoint import (
    EXCHANGE,
    HEADERS,
    JOB_ID,
    RATES,
    REPLAYED,
    ROUTE,
    ROUTED,
    STARTED,
    WIRE,
    Json,
)
from stoker.runtime.gateway.errors import ApiError, internal_error, queue_unavailable

if TYPE_CHECKING:
    from stoker.runtime.gateway.context import Gateway

SANE_ID = re.compile(r"[A-Za-z0-9._:/=+-]{1,128}")
REQUEST_ID = "stoker.request_id"
CLIENT_GONE = 499

log = logging.getLogger("stoker.gateway")


class Envelope:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope, send)
        try:
            await self._app(scope, receive, exchange.send)
        except ClientGone:
            exchange.status = exchange.status or CLIENT_GONE
        except Exception as error:
            if exchange.status:
                raise
            await error_response(as_api_error(error, exchange.request_id))(scope, receive, exchange.send)
        finally:
            exchange.count()
            exchange.let_go()


class Exchange:
    """One request and its answer; `status` is 0 until the answer has started."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self.status = 0
        scope[HEADERS] = headers = headers_of(scope)
        self.request_id = request_id(headers.get("x-request-id", ""))
        scope[STARTED] = time.monotonic()
        scope[REQUEST_ID] = self.request_id
        scope[EXCHANGE] = self

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], *self._own_headers()]
        await self._send(message)

    def answered(self, response: Response) -> bool:
        """Whether it could be sent at once, as a whole."""
        wire = self._scope.get(WIRE)
        if wire is None or type(response).__call__ is not Response.__call__ or response.background is not None:
            return False
        headers = [*response.raw_headers, *self._own_headers()]
        if not wire.answer(response.status_code, headers, bytes(response.body)):
            return False
        self.status = response.status_code
        return True

    def _own_headers(self) -> Iterator[tuple[bytes, bytes]]:
        yield b"x-request-id", self.request_id.encode()
        spent_ms = 1000 * (time.monotonic() - self._scope[STARTED])
        yield b"openai-processing-ms", str(round(spent_ms)).encode()
        for name, value in self._scope.get(RATES, {}).items():
            yield name.encode(), value.encode()
        if job_id := self._scope.get(JOB_ID):
            yield b"x-job-id", job_id.encode()
        if routed := self._scope.get(ROUTED):
            yield b"x-route", routed[0].encode()
        if self._scope.get(REPLAYED):
            yield b"idempotency-replayed", b"true"

    def count(self) -> None:
        gateway: Gateway = self._scope["app"].state.gateway
        seconds = time.monotonic() - self._scope[STARTED]
        gateway.metrics.answered(self._scope["method"], self._scope.get(ROUTE, "unmatched"), self.status, seconds)

    def let_go(self) -> None:
        """Of what leads back to the scope: no request is left to the garbage collector."""
        self._scope.pop(WIRE, None)
        self._scope.pop(EXCHANGE, None)


def headers_of(scope: Scope) -> dict[str, str]:
    """Of a header that is there more than once, the first."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}


def request_id(given: str) -> str:
    """The client's own id when it is harmless to repeat in a header and in logs."""
    return given if SANE_ID.fullmatch(given) else new_request_id()


def new_request_id() -> str:
    return f"req_{random.getrandbits(128):032x}"


REFUSALS = ("MISCONF", "OOM", "READONLY", "NOREPLICAS", "LOADING", "CLUSTERDOWN", "MASTERDOWN")


def as_api_error(error: BaseException, request_id: str) -> ApiError:
    """What a client is told about an exception; unexpected ones are logged and stay vague."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, AWAY):
        return queue_unavailable()
    if isinstance(error, ResponseError) and str(error).startswith(REFUSALS):
        log.error("the queue's server refuses writes: %s", error)
        return queue_unavailable()
    kind = "queue" if isinstance(error, RedisError) else "gateway"
    log.error("%s failed on request %s", kind, request_id, exc_info=error)
    return internal_error(request_id)


def error_response(error: ApiError) -> Response:
    return Json(error.body(), status_code=error.status, headers=error.headers)
