"""What every answer has, whatever happened below: request id, job id, the shape of errors, a count in the metrics."""

import logging
import re
import time
import uuid
from typing import TYPE_CHECKING

from redis.exceptions import RedisError, ResponseError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker.queue.retry import AWAY
from stoker.runtime.gateway.body import ClientGone
from stoker.runtime.gateway.endpoint import JOB_ID, REPLAYED, ROUTE, STARTED, Json
from stoker.runtime.gateway.errors import ApiError, internal_error, not_found, queue_unavailable

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


class Exchange:
    """One request and its answer; `status` is 0 until the answer has started."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self.status = 0
        self.request_id = request_id(Headers(scope=scope).get("x-request-id", ""))
        scope[STARTED] = time.monotonic()
        scope[REQUEST_ID] = self.request_id

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.request_id
            if job_id := self._scope.get(JOB_ID):
                headers["x-job-id"] = job_id
            if self._scope.get(REPLAYED):
                headers["idempotency-replayed"] = "true"
        await self._send(message)

    def count(self) -> None:
        gateway: Gateway = self._scope["app"].state.gateway
        seconds = time.monotonic() - self._scope[STARTED]
        gateway.metrics.answered(self._scope["method"], self._scope.get(ROUTE, "unmatched"), self.status, seconds)


def request_id(given: str) -> str:
    """The client's own id when it is harmless to repeat in a header and in logs."""
    return given if SANE_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"


REFUSALS = ("MISCONF", "OOM", "READONLY", "LOADING", "CLUSTERDOWN", "MASTERDOWN")


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


async def unrouted(request: Request, error: Exception) -> Response:
    """Starlette's own refusals, which are unknown paths only: methods are `Resource`'s business."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(not_found(f"Unknown request URL: {request.method} {request.scope['path']}."))
    return error_response(ApiError(error.status_code, error.detail))
