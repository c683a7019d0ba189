"""An SSE answer that starts late: until there is something to say, a failure can still be an HTTP status."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stoker.queue.events import Event
from stoker.runtime.gateway import sse
from stoker.runtime.gateway.body import ClientGone
from stoker.runtime.gateway.context import Gateway
from stoker.runtime.gateway.endpoint import WIRE
from stoker.runtime.gateway.envelope import REQUEST_ID, as_api_error
from stoker.runtime.gateway.following import Following

Frames = AsyncGenerator[bytes, None]


class EventStream(Response):
    """The frames of one job, and while there are none, comments that say why. Behind the first frame most chunks leave
    as they arrive, the way `render` shows them; `frames` meets the others."""

    def __init__(self, gateway: Gateway, source: Following, frames: Frames, render: Callable[[Event], bytes]) -> None:
        super().__init__(headers=sse.HEADERS)
        del self.headers["content-length"]
        self._frames = frames
        self._gateway = gateway
        self._interval_s = gateway.settings.keepalive_s
        self._source = source
        self._render = render

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A failure after the first frame or comment becomes an error event, the last."""
        outlet = Outlet(send, self, scope.get(WIRE))
        comments = asyncio.create_task(self._comment(outlet))
        last = b""
        try:
            async with aclosing(self._frames) as frames:
                await outlet.send(await anext(frames))
                self._source.relay(partial(self._relay, outlet))
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

    def _relay(self, outlet: "Outlet", event: Event) -> bool:
        if not outlet.free:
            return False
        if piece := self._render(event):
            outlet.push(piece)
        return True

    async def _comment(self, outlet: "Outlet") -> None:
        """Sleeps for as long as the stream may stay silent, so that a frame costs it nothing. Before there is a job it
        says nothing: the head would go out without the job's id, and whatever refuses the job could be no status."""
        await self._source.exists.wait()
        while True:
            quiet_s = outlet.quiet_s()
            if quiet_s < self._interval_s:
                await asyncio.sleep(self._interval_s - quiet_s)
                continue
            comment = sse.comment(await self._gateway.why_waiting(self._source.job_id))
            if outlet.quiet_s() >= self._interval_s:
                await outlet.send(comment)


class Wire(Protocol):
    """See `connection.Wire`."""

    @property
    def free(self) -> bool: ...

    def write(self, piece: bytes) -> None: ...


class Outlet:
    """Sends pieces of one answer, one after another, its head before the first."""

    def __init__(self, send: Send, head: Response, wire: Wire | None) -> None:
        self.started = False
        self._send = send
        self._head = head
        self._wire = wire
        self._clock = asyncio.get_running_loop().time
        self._sent_at = self._clock()
        self._turn = asyncio.Lock()
        self._senders = 0

    @property
    def free(self) -> bool:
        """Whether a piece can be pushed."""
        return self.started and self._wire is not None and self._wire.free and not self._senders

    def quiet_s(self) -> float:
        return self._clock() - self._sent_at

    async def send(self, piece: bytes, *, more: bool = True) -> None:
        # Those who wait for their turn count: nothing may be pushed between two turns.
        self._senders += 1
        try:
            async with self._turn:
                await self._send_next(piece, more)
        finally:
            self._senders -= 1

    async def _send_next(self, piece: bytes, more: bool) -> None:
        self._sent_at = self._clock()
        if not self.started:
            self.started = True
            head = {"status": self._head.status_code, "headers": self._head.raw_headers}
            await self._send({"type": "http.response.start", **head})
        await self._send({"type": "http.response.body", "body": piece, "more_body": more})

    def push(self, piece: bytes) -> None:
        """Sends at once. Only when `free`."""
        assert self._wire is not None
        self._sent_at = self._clock()
        self._wire.write(piece)
