"""A log that is followed, as server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stoker.queue.retry import AWAY
from stoker.runtime.gateway import sse
from stoker.runtime.gateway.context import Gateway
from stoker.runtime.gateway.envelope import REQUEST_ID, as_api_error
from stoker.runtime.gateway.errors import ApiError

LOOK_S = 0.25
AT_ONCE = 500

Lines = AsyncGenerator[Mapping[str, Any] | None, None]


class LogStream(Response):
    """Looks for new lines after each None of `lines`; their end is the event "end". It breaks off when the gateway
    stops, and a failure is the event "error": a client goes on behind its last id, if its key still holds."""

    def __init__(self, gateway: Gateway, lines: Lines) -> None:
        super().__init__(headers=sse.HEADERS)
        del self.headers["content-length"]
        self._lines = lines
        self._keepalive_s = gateway.settings.keepalive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._lines) as lines:
            first = await anext(lines, None)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            last = sse.event({}, name="end")
            try:
                if scope["method"] == "HEAD" or not await self._send_all(
                    first, lines, send, scope["app"].state.leaving
                ):
                    last = b""
            except (*AWAY, ApiError) as error:
                last = sse.event(as_api_error(error, scope[REQUEST_ID]).body(), name="error")
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_all(
        self, first: Mapping[str, Any] | None, lines: Lines, send: Send, leaving: Callable[[], bool]
    ) -> bool:
        """False: there would have been more."""
        clock = asyncio.get_running_loop().time
        sent_at = clock() - self._keepalive_s
        waiting = [frame(first)] if first else []
        async for line in lines:
            if line is not None:
                waiting.append(frame(line))
                if len(waiting) < AT_ONCE:
                    continue
            if waiting or clock() - sent_at >= self._keepalive_s:
                piece = b"".join(waiting) or sse.comment("no new lines")
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                waiting, sent_at = [], clock()
            if line is None and leaving():
                return False
            if line is None:
                await asyncio.sleep(LOOK_S)
        if waiting:
            await send({"type": "http.response.body", "body": b"".join(waiting), "more_body": True})
        return True


def frame(line: Mapping[str, Any]) -> bytes:
    return sse.event(line, id=line["id"])
