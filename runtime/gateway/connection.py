"""uvicorn's HTTP connection, with what a server that faces strangers needs: limits on a request's head, deadlines for
its bytes. An answer's head and its first bytes leave in one write."""

import asyncio
from collections import deque
from collections.abc import Callable
from fcntl import ioctl
from sys import byteorder
from termios import TIOCOUTQ
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from stoker.runtime.gateway.endpoint import WIRE
from stoker.runtime.gateway.envelope import new_request_id
from stoker.runtime.gateway.errors import ApiError, bad_request
from stoker.runtime.gateway.sse import json_bytes

HEAD_S = 10.0
MOST_HEADERS = 100
MOST_HEAD_BYTES = 65_536
TAIL_S = 10.0
STUCK_S = 30.0
LEAST_PER_S = 1024
MOST_PIPELINED = 8


class HeadTooLarge(Exception):
    pass


def head_too_large() -> ApiError:
    message = f"A request's head may have {MOST_HEADERS} headers and {MOST_HEAD_BYTES} bytes."
    return ApiError(431, message, code="request_head_too_large")


class Connection(HttpToolsProtocol):
    """A request's head must be there HEAD_S after its first byte (or after the connection), and what is left of a body
    that nobody reads TAIL_S after the answer; else the connection is closed. Bodies that are read have their own
    deadline, see `body.py`. A client that takes less than LEAST_PER_S of the answer that waits for it is cut off after
    STUCK_S: its events are in the queue, from where it can go on with Last-Event-ID."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = Outgoing(transport, self.loop, lambda: self._in_message)  # type: ignore[assignment]
        self._in_head = True
        self._in_message = False
        self._head_bytes = 0
        self._too_large = False
        self._deadline: asyncio.TimerHandle | None = self.loop.call_later(HEAD_S, transport.close)
        self._stuck: asyncio.TimerHandle | None = None
        self._earlier: list[RequestResponseCycle] = []
        self._refusal = b""

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        self._clear_stuck()
        for cycle in self._earlier:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._clear_stuck()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._refusal or self.transport.is_closing():
            return
        super().data_received(data)
        if self._deadline is None and (limit_s := self._limit_s()):
            self._deadline = self.loop.call_later(limit_s, self.transport.abort)

    def _limit_s(self) -> float:
        """How long what has begun may last; 0: somebody else looks after that."""
        if self._refusal:
            return 0
        if self._in_message and self._in_head:
            return HEAD_S
        if self.cycle is not None and not self.cycle.response_complete:
            return 0
        if self._in_message:
            return TAIL_S
        # Bytes that begin no request have ended uvicorn's wait for the next one.
        return HEAD_S if self.timeout_keep_alive_task is None else 0

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._in_message = True
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(name + value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._clear_deadline()
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.scope[WIRE] = Wire(self.cycle)  # type: ignore[typeddict-unknown-key]
            if self.cycle.scope["http_version"] == "1.0":
                self.cycle.send = Unchunked(self.cycle).send  # type: ignore[method-assign]
        if before is not None and not before.response_complete:
            self._wait_behind(before)

    def _wait_behind(self, cycle: RequestResponseCycle) -> None:
        """A client that sent its next request already may leave before it has the first answer: uvicorn, which stops
        reading then, and knows the last request alone, would not tell."""
        self._earlier = [*(each for each in self._earlier if not each.response_complete), cycle]
        if len(self._earlier) < MOST_PIPELINED:
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        self._in_message = False
        self._clear_deadline()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._refuse_in_turn()

    def send_400_response(self, msg: str) -> None:
        """Of a request that never reached the application, or not whole: when those before it have their answers."""
        error = head_too_large() if self._too_large else bad_request("This is not a valid HTTP/1.1 request.")
        body = json_bytes(error.body())
        head = [
            STATUS_LINE[error.status],
            b"content-type: application/json\r\nconnection: close\r\n",
            f"x-request-id: {new_request_id()}\r\ncontent-length: {len(body)}\r\n\r\n".encode(),
        ]
        self._refusal = b"".join([*head, body])
        self._clear_deadline()
        if self._in_message and not self._in_head:
            self._give_up(self.cycle)
        self._refuse_in_turn()

    def _give_up(self, broken: RequestResponseCycle) -> None:
        """A request whose body can't be read on; the answer to it may be under way, and can't become another."""
        if broken.response_started:
            self.transport.close()
        self.pipeline = deque(each for each in self.pipeline if each[0] is not broken)
        broken.disconnected = broken.response_complete = True
        broken.message_event.set()

    def _refuse_in_turn(self) -> None:
        waits = any(not cycle.response_complete for cycle in (*self._earlier, self.cycle) if cycle is not None)
        if self._refusal and not waits and not self.transport.is_closing():
            self.transport.write(self._refusal)
            self.transport.close()

    def _count(self, part: bytes) -> None:
        """Raises HeadTooLarge, which ends the parsing."""
        self._head_bytes += len(part)
        if self._head_bytes > MOST_HEAD_BYTES or len(self.headers) >= MOST_HEADERS:
            self._too_large = True
            raise HeadTooLarge

    def _watch_reader(self) -> None:
        self._clear_stuck()
        self._stuck = self.loop.call_later(STUCK_S, self._cut_unless_read, self._untaken())

    def _cut_unless_read(self, before: int) -> None:
        if before - self._untaken() < LEAST_PER_S * STUCK_S:
            self.transport.abort()
        else:
            self._watch_reader()

    def _untaken(self) -> int:
        """Bytes that wait here and in the kernel, which tells that it has room only when a lot of it is free."""
        waiting = ioctl(self.transport.get_extra_info("socket").fileno(), TIOCOUTQ, bytes(4))
        return self.transport.get_write_buffer_size() + int.from_bytes(waiting, byteorder)

    def _clear_stuck(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Wire:
    """The short way of one answer to its client, without coroutines: for the middle of a body in chunks, which every
    token of every stream is, and for answers that are whole."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def free(self) -> bool:
        """Whether a piece can leave at once."""
        cycle = self._cycle
        return (
            not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete)
            and cycle.chunked_encoding is True
        )

    def write(self, piece: bytes) -> None:
        """Only when `free`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def answer(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> bool:
        """What uvicorn's own `send` makes of a whole answer. False, and nothing was sent, when that must see to it."""
        cycle = self._cycle
        usual = cycle.keep_alive and not cycle.more_body and cycle.scope["method"] != "HEAD"
        if not usual or cycle.response_started or cycle.disconnected or cycle.flow.write_paused:
            return False
        lines = [b"%b: %b\r\n" % header for header in (*cycle.default_headers, *headers)]
        head = b"".join((STATUS_LINE[status], *lines, b"\r\n"))
        if head.count(b"\n") != len(lines) + 2 or head.count(b"\r") != len(lines) + 2:
            return False
        cycle.response_started = cycle.response_complete = True
        cycle.transport.write(head + body)
        cycle.message_event.set()
        cycle.on_response()
        return True


class Unchunked:
    """What sends an answer to a client of HTTP/1.0, which knows no chunks: one whose length isn't told before ends with
    the connection."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._open = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._open = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if self._open:
                self._cycle.chunked_encoding = False
        elif self._open:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)


class Outgoing:
    """A transport that holds an answer's head back until its first bytes come, or until the event loop's next turn. It
    is closed in two steps while there is something `unread`: a client that is still writing would see a reset
    connection instead of the answer."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, unread: Callable[[], bool]
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._unread = unread
        self._held = b""
        self._closing = False
        self.abort = transport.abort
        self.get_write_buffer_size = transport.get_write_buffer_size

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        if self._held:
            data, self._held = self._held + data, b""
        elif data.startswith(b"HTTP/1.1 "):
            self._held = data
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def close(self) -> None:
        self._flush()
        if self.is_closing():
            return
        self._closing = True
        if self._unread() and self._transport.can_write_eof():
            self._transport.write_eof()
            self._transport.resume_reading()
            self._loop.call_later(TAIL_S, self._transport.abort)
        else:
            self._transport.close()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def _flush(self) -> None:
        data, self._held = self._held, b""
        if data and not self._transport.is_closing():
            self._transport.write(data)
