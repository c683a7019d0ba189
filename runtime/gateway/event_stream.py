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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A failure after the first frame or comment becomes an error event, the last."""
        outlet = Outlet(send, self)
        comments = asyncio.create_task(self._comment(outlet))
        last = b""
        try:
            async with aclosing(self._frames) as frames:
                async for frame in frames:
                    await outlet.send(frame)
        except ClientGone:
            pass
        except Exception as error:
            if not outlet.started:
                raise
            last = sse.event(as_api_error(error, scope[REQUEST_ID]).body(), name="error")
        finally:
            comments.cancel()
            await asyncio.gather(comments, return_exceptions=True)
        await outlet.send(last, more=False)

    async def _comment(self, outlet: "Outlet") -> None:
        """Sleeps for as long as the stream may stay silent, so that a frame costs it nothing."""
        while True:
            quiet_s = outlet.quiet_s()
            if quiet_s < self._interval_s:
                await asyncio.sleep(self._interval_s - quiet_s)
                continue
            comment = sse.comment(await self._silence())
            if outlet.quiet_s() >= self._interval_s:
                await outlet.send(comment)


class Outlet:
    """Sends pieces of one answer, one after another, its head before the first."""

    def __init__(self, send: Send, head: Response) -> None:
        self.started = False
        self._send = send
        self._head = head
        self._clock = asyncio.get_running_loop().time
        self._sent_at = self._clock()
        self._turn = asyncio.Lock()

    def quiet_s(self) -> float:
        return self._clock() - self._sent_at

    async def send(self, piece: bytes, *, more: bool = True) -> None:
        async with self._turn:
            self._sent_at = self._clock()
            if not self.started:
                self.started = True
                head = {"status": self._head.status_code, "headers": self._head.raw_headers}
                await self._send({"type": "http.response.start", **head})
            await self._send({"type": "http.response.body", "body": piece, "more_body": more})
