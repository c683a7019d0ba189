"""Answers that take the short way are, byte for byte, what uvicorn would send."""

import asyncio
import re
from typing import Any, cast

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from stoker.runtime.gateway.connection import MOST_PIPELINED, Connection
from stoker.runtime.gateway.endpoint import WIRE

HEADERS = [(b"content-type", b"text/plain"), (b"content-length", b"5")]
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Server:
    """One connection to an application that answers "hello", the short way if it can and `short` allows."""

    def __init__(self, *, short: bool, headers: list[tuple[bytes, bytes]] = HEADERS, reads: bool = True) -> None:
        self.took_the_short_way: list[bool] = []
        self._short, self._headers, self._reads = short, headers, reads
        config = uvicorn.Config(
            self._app, interface="asgi3", http=Connection, access_log=False, proxy_headers=False, date_header=False
        )
        config.load()
        self.transport = Transport()
        self.connection = Connection(config, ServerState(), {})
        self.connection.connection_made(self.transport)

    async def get(self, request: bytes) -> bytes:
        self.transport.written = b""
        self.connection.data_received(request)
        for _ in range(20):
            await asyncio.sleep(0)
        return self.transport.written

    def close(self) -> None:
        self.connection.connection_lost(None)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._reads:
            while (await receive()).get("more_body"):
                pass
        short = self._short and scope[WIRE].answer(200, self._headers, b"hello")
        self.took_the_short_way.append(short)
        if not short:
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            await send({"type": "http.response.body", "body": b"hello"})


@pytest.mark.parametrize(
    ("request_bytes", "short"),
    [
        (GET, True),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc", True),
        (b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\nabc", True),
        (b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\nhost: x\r\n\r\n", False),
        (GET + GET + GET, True),
    ],
)
async def test_the_short_way_sends_the_same(request_bytes: bytes, short: bool) -> None:
    quick, usual = Server(short=True), Server(short=False)
    answers = [await server.get(request_bytes) for server in (quick, usual)]
    assert answers[0] == answers[1] and answers[0].startswith(b"HTTP/1.1 ") and b"200 OK" in answers[0]
    assert set(quick.took_the_short_way) == {short}
    assert quick.transport.closed == usual.transport.closed
    if not quick.transport.closed:
        assert await quick.get(GET) == await usual.get(GET) != b""
    quick.close()
    usual.close()


class Streaming(Server):
    """An answer in three parts, whose length isn't told before."""

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for body, more in ((b"one", True), (b"", True), (b"two", True), (b"", False)):
            await send({"type": "http.response.body", "body": body, "more_body": more})
            self.took_the_short_way.append(scope[WIRE].free)


async def test_a_client_of_http_1_0_gets_no_chunks_but_the_end_of_the_connection() -> None:
    new = Streaming(short=False)
    head, _, body = (await new.get(GET)).partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head and body == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
    assert not new.transport.closed and any(new.took_the_short_way)
    for line in (b"", b"connection: keep-alive\r\n"):
        old = Streaming(short=False)
        head, _, body = (await old.get(b"GET / HTTP/1.0\r\nhost: x\r\n" + line + b"\r\n")).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head and b"connection: close" in head and body == b"onetwo"
        assert old.transport.closed and not any(old.took_the_short_way)
        old.close()
    new.close()


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: b", b"a\nb", b"a\rb"])
async def test_no_header_can_smuggle_another(value: bytes) -> None:
    server = Server(short=True, headers=[*HEADERS, (b"x-route", value)])
    answer = await server.get(GET)
    assert server.took_the_short_way == [False] or not server.took_the_short_way
    assert b"set-cookie" not in answer and b"a" + value[1:2] not in answer
    server.close()


async def test_a_body_that_is_not_read_goes_the_usual_way() -> None:
    server = Server(short=True, reads=False)
    answer = await server.get(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabc")
    assert answer.startswith(b"HTTP/1.1 200 ") and server.took_the_short_way == [False]
    server.close()


async def test_a_client_that_does_not_read_is_waited_for() -> None:
    server = Server(short=True)
    cast(Any, server.connection).flow.pause_writing()
    assert await server.get(GET) == b""
    server.connection.resume_writing()
    for _ in range(20):
        await asyncio.sleep(0)
    assert server.transport.written.endswith(b"hello") and server.took_the_short_way == [False]
    server.close()


async def test_a_client_that_leaves_is_noticed_by_all_that_it_asked_for() -> None:
    """Also by the first of several requests, whose answer is under way; nothing is written any more."""
    heard: list[str] = []

    class Waiting(Server):
        async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while (message := await receive())["type"] != "http.disconnect":
                pass
            heard.append(message["type"])
            assert not scope[WIRE].free and not scope[WIRE].answer(200, HEADERS, b"hello")

    server = Waiting(short=True)
    server.connection.data_received(GET)
    await asyncio.sleep(0)
    server.connection.data_received(GET + GET)
    server.transport.closed = True
    server.close()
    for _ in range(20):
        await asyncio.sleep(0)
    assert heard == ["http.disconnect"] and server.transport.written == b""


async def test_only_some_requests_are_read_ahead() -> None:
    server = Server(short=True)
    server._app = cast(Any, None)
    paused: list[bool] = []
    server.transport.pause_reading = lambda: paused.append(True)  # type: ignore[method-assign]
    server.transport.resume_reading = lambda: paused.append(False)  # type: ignore[method-assign]
    for _ in range(MOST_PIPELINED):
        server.connection.data_received(GET)
        assert not paused or not paused[-1]
    server.connection.data_received(GET)
    assert paused[-1]


GARBAGE = b"GARBAGE\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


def statuses(written: bytes) -> list[bytes]:
    return re.findall(rb"HTTP/1.1 (\d{3})", written)


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ([GET + GARBAGE], [b"200", b"400"]),
        ([GET + GET + GARBAGE], [b"200", b"200", b"400"]),
        ([GET, GARBAGE], [b"200", b"400"]),
        ([GET + GARBAGE, GET], [b"200", b"400"]),
        ([GET + b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200], [b"200", b"431"]),
        ([GET + CHUNKED + b"zz\r\n"], [b"200", b"400"]),
        ([CHUNKED + b"1\r\n7\r\nzz\r\n"], [b"400"]),
        ([GARBAGE], [b"400"]),
    ],
)
async def test_what_is_no_request_is_refused_when_those_before_it_have_their_answers(
    short: bool, sent: list[bytes], expected: list[bytes]
) -> None:
    server = Server(short=short)
    server.transport.written = b""
    for part in sent:
        server.connection.data_received(part)
    for _ in range(40):
        await asyncio.sleep(0)
    assert statuses(server.transport.written) == expected
    assert server.transport.written.count(b"hello") == expected.count(b"200")
    assert b"connection: close" in server.transport.written.rpartition(b"HTTP/1.1 4")[2]
    assert server.transport.closed
    server.close()


async def test_a_slow_answer_is_waited_for_and_a_client_that_leaves_meanwhile_is_noticed() -> None:
    slow, heard = asyncio.Event(), []

    class Slow(Server):
        async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
            await slow.wait()
            await super()._app(scope, receive, send)
            heard.append((await receive())["type"])

    server = Slow(short=True)
    assert await server.get(GET + GARBAGE) == b"" and not server.transport.closed
    assert server.connection._deadline is None, "nothing ends the answer early"
    slow.set()
    assert statuses(await server.get(b"")) == [b"200", b"400"] and server.transport.closed
    server.close()
    assert heard == ["http.disconnect"]
    slow.clear()
    server = Slow(short=True)
    await server.get(GET + GARBAGE)
    server.transport.closed = True
    server.close()
    slow.set()
    assert await server.get(b"") == b""


async def test_an_answer_that_has_begun_before_its_request_went_wrong_gets_no_other_into_it() -> None:
    class Early(Server):
        async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
            assert (await receive())["type"] == "http.disconnect"
            await send({"type": "http.response.body", "body": b"ended"})

    server = Early(short=False)
    assert statuses(await server.get(CHUNKED)) == [b"200"]
    assert await server.get(b"zz\r\n") == b"" and server.transport.closed
    server.close()
