"""HTTP as servers really speak it, byte by byte: heads in pieces, bodies of every kind, and nonsense."""

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from stoker.coldstart.http_connection import (
    HttpConnection,
    Origin,
    Patience,
    Response,
    Stalled,
    dechunked,
    parse_head,
)
from stoker.coldstart.store import ReadWatch

QUICK = Patience(connect_s=5, first_byte_s=1, stall_s=1)
Connect = Callable[..., HttpConnection]


class ScriptedServer:
    """Answers each request of each connection with the next script: pieces of bytes, sent one by one."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.scripts: list[list[bytes]] = []
        self.heads: list[str] = []
        self.connections = 0
        self.done = threading.Event()
        self._threads = [threading.Thread(target=self.serve)]
        self._threads[0].start()

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.connections += 1
            self._threads.append(threading.Thread(target=self.answer, args=(connection,)))
            self._threads[-1].start()

    def answer(self, connection: socket.socket) -> None:
        with connection, suppress(ConnectionError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while head := connection.recv(4096):
                self.heads.append(head.decode())
                for piece in self.scripts.pop(0):
                    if piece == b"close":
                        return
                    if piece == b"wait":
                        self.done.wait(5)
                        return
                    connection.sendall(piece)
                    time.sleep(0.01)

    def close(self) -> None:
        self.done.set()
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


@pytest.fixture
def connection(server: ScriptedServer) -> Iterator[HttpConnection]:
    connection = HttpConnection(Origin("http", "127.0.0.1", server.listener.getsockname()[1]), None, QUICK)
    yield connection
    connection.close()


def get(connection: HttpConnection, length: int) -> tuple[Response, bytes]:
    watch, into = ReadWatch(), bytearray(length)
    response = connection.request("/x?y=1", {"Range": "bytes=0-9"}, watch)
    count = connection.receive(response, memoryview(into), watch)
    assert watch.received == count
    return response, bytes(into[:count])


def test_a_request_is_what_servers_expect(server: ScriptedServer, connection: HttpConnection):
    server.scripts = [[b'HTTP/1.1 206 Partial Content\r\nContent-Length: 4\r\nETag: "\xe9"\r\n\r\nbody']]
    response, body = get(connection, 4)
    assert (response.status, response.length, body) == (206, 4, b"body")
    port = server.listener.getsockname()[1]
    assert server.heads[0].splitlines()[:2] == ["GET /x?y=1 HTTP/1.1", f"Host: 127.0.0.1:{port}"]
    assert "Range: bytes=0-9" in server.heads[0] and "Accept-Encoding: identity" in server.heads[0]


def test_a_head_in_pieces_and_a_body_that_overlaps_it(server: ScriptedServer, connection: HttpConnection):
    whole = b"HTTP/1.1 200 OK\r\nA: 1\r\nContent-Length: 6\r\n\r\nabcdef"
    for cuts in ((1, 20, 30), (17, 40, 45), (len(whole) - 3,)):
        edges = [0, *cuts, len(whole)]
        server.scripts = [[whole[a:b] for a, b in zip(edges, edges[1:], strict=False)]]
        response, body = get(connection, 6)
        assert response.headers == {"a": "1", "content-length": "6"} and body == b"abcdef"
    assert server.connections == 1


@pytest.mark.parametrize("version", [b"HTTP/1.1 200 OK\r\nConnection: close", b"HTTP/1.0 200 OK"])
def test_a_server_that_closes_is_connected_to_anew(server: ScriptedServer, connection: HttpConnection, version: bytes):
    server.scripts = [[version + b"\r\nContent-Length: 1\r\n\r\nx", b"close"]] * 2
    assert get(connection, 1)[1] == get(connection, 1)[1] == b"x"
    assert server.connections == 2


def test_a_short_body_is_returned_as_far_as_it_came(server: ScriptedServer, connection: HttpConnection):
    server.scripts = [[b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", b"close"]]
    assert get(connection, 9)[1] == b"abc"


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ([b"close"], http.client.RemoteDisconnected),
        ([b"HTTP/1.1 20", b"close"], http.client.IncompleteRead),
        ([b"+OK hello\r\n\r\n"], http.client.BadStatusLine),
        ([b"HTTP/1.1 abc\r\n\r\n"], http.client.BadStatusLine),
        ([b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n"], http.client.HTTPException),
        ([b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * (80 << 10)], http.client.IncompleteRead),
        ([b"wait"], Stalled),
    ],
)
def test_what_is_no_answer(
    server: ScriptedServer, connection: HttpConnection, script: list[bytes], kind: type[Exception]
):
    server.scripts = [script, script]
    with pytest.raises(kind):
        get(connection, 1)


def error_body(server: ScriptedServer, connection: HttpConnection, limit: int, *pieces: bytes) -> bytes:
    server.scripts.append(list(pieces))
    response = connection.request("/", {}, ReadWatch())
    return connection.read(response, limit, ReadWatch())


def test_small_bodies_of_every_kind(server: ScriptedServer, connection: HttpConnection):
    chunked = b"HTTP/1.1 403 Forbidden\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert error_body(server, connection, 99, b"HTTP/1.1 500 X\r\nContent-Length: 5\r\n\r\n", b"error") == b"error"
    assert error_body(server, connection, 99, b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n") == b""
    assert server.connections == 1
    assert error_body(server, connection, 99, chunked, b"4\r\n<Err", b"\r\n3;x=y\r\nor>\r\n0\r\n\r\n") == b"<Error>"
    assert error_body(server, connection, 3, b"HTTP/1.1 500 X\r\nContent-Length: 5\r\n\r\nerror") == b"err"
    assert error_body(server, connection, 99, b"HTTP/1.1 500 X\r\n\r\nto the", b" end", b"close") == b"to the end"


def test_a_small_body_that_breaks_off_is_not_waited_for(server: ScriptedServer):
    patient = HttpConnection(Origin("http", "127.0.0.1", server.listener.getsockname()[1]), None, Patience(stall_s=60))
    head = b"HTTP/1.1 403 Forbidden\r\nTransfer-Encoding: chunked\r\n\r\n"
    start = time.monotonic()
    assert error_body(server, patient, 99, head + b"4\r\nhalf", b"close") == b"half"
    assert time.monotonic() - start < 30
    patient.close()


@pytest.mark.parametrize(
    ("body", "payload"),
    [(b"", b""), (b"0\r\n\r\n", b""), (b"zz\r\nab", b""), (b"3\r\nabc\r\n2\r\nde", b"abcde"), (b"5", b"")],
)
def test_chunked_bodies(body: bytes, payload: bytes):
    assert dechunked(body) == payload


def test_heads():
    response = parse_head(b"HTTP/1.1 206\r\nA:b:c \r\nx-empty:", b"rest")
    assert (response.status, response.headers, response.rest) == (206, {"a": "b:c", "x-empty": ""}, b"rest")
    for text in (b"", b"12", b"-1", b"1_0", b"\xb2"):
        length = parse_head(b"HTTP/1.1 200 OK\r\nContent-Length: " + text, b"").length
        assert length == (12 if text == b"12" else None)


def test_authorities():
    names = [("https", "a.b", 443), ("https", "a.b", 80), ("http", "::1", 80), ("http", "::1", 8080)]
    assert [Origin(*name).authority for name in names] == ["a.b", "a.b:80", "[::1]", "[::1]:8080"]
