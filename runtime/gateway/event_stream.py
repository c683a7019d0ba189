"""An SSE answer that starts late: until there is something to say, a failure can still be an HTTP status."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stoker.runtime.gateway import sse
from stoker.runtime.gateway.body import ClientGone
from stoker.runtime.gateway.envelope import REQUEST_ID, as_api_error

Frames = AsyncGenerator[bytes, None]


class EventStream(Response):
    """`silence` gives the comment that is sent after each `interval_s` seconds without a frame."""

    def __init__(self, frames: Frames, silence: Callable[[], Awaitable[str]], interval_s: float) -> None:
        super().__init__(headers=sse.HEADERS)
        del self.headers["content-length"]
        self._frames = frames
        self._silence = silence
        self._interval_s = interval_s
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._pieces(scope[REQUEST_ID])) as pieces:
                async for piece in pieces:
                    await self._start(send)
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        finally:
            await self._frames.aclose()
        await self._start(send)
        await send({"type": "http.response.body", "body": b""})

    async def _start(self, send: Send) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _pieces(self, request_id: str) -> AsyncGenerator[bytes, None]:
        """Frames and, between them, comments. A failure after the first of either becomes an error event, the last."""
        coming = asyncio.ensure_future(anext(self._frames))
        try:
            while True:
                await asyncio.wait((coming,), timeout=self._interval_s)
                if not coming.done():
                    yield sse.comment(await self._silence())
                    continue
                yield coming.result()
                coming = asyncio.ensure_future(anext(self._frames))
        except (StopAsyncIteration, ClientGone):
            return
        except Exception as error:
            if not self._started:
                raise
            yield sse.event(as_api_error(error, request_id).body(), name="error")
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
