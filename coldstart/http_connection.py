"""A keep-alive HTTP/1.1 connection that receives bodies straight into the caller's memory. GET only; what a load needs
of the protocol and no more, because http.client's parsing alone limits one process to a few GB/s."""

import http.client
import math
import socket
import ssl
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from stoker.coldstart.store import ReadWatch

MAX_HEAD_BYTES = 64 << 10
HEAD_BYTES = 2 << 10
LAST_CHUNK = b"0\r\n\r\n"
# How long a blocked call may ignore `ReadWatch.stop`.
SLICE_S = 0.25
DEFAULT_PORTS = {"http": 80, "https": 443}


class Patience(NamedTuple):
    """How long to wait: for the connection, for an answer's first byte, for more of it, and for all of its body."""

    connect_s: float = 5.0
    first_byte_s: float = 20.0
    stall_s: float = 10.0
    body_s: float = math.inf


class Origin(NamedTuple):
    scheme: str
    host: str
    port: int

    @property
    def authority(self) -> str:
        """As the Host header has it, which signatures cover."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


@dataclass(slots=True)
class Response:
    """Status and headers (names in lower case); `rest` is what came of the body with them."""

    status: int
    headers: dict[str, str]
    rest: bytes
    keeps_open: bool

    @property
    def length(self) -> int | None:
        """The body's announced length; None when it is chunked or ends with the connection."""
        text = self.headers.get("content-length", "")
        return int(text) if text.isascii() and text.isdigit() and not self.chunked else None

    @property
    def chunked(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "").lower()


class Stalled(OSError):
    """Nothing arrived for too long."""


class Cancelled(Exception):
    """The read's owner doesn't want it any more."""


class HttpConnection:
    """For one thread at a time; to be closed after an exception."""

    def __init__(self, origin: Origin, tls: ssl.SSLContext | None, patience: Patience) -> None:
        self.origin = origin
        self._tls, self._patience = tls, patience
        self._socket: socket.socket | None = None
        self._flags = 0

    def request(self, target: str, headers: Mapping[str, str], watch: ReadWatch) -> Response:
        """Sends a GET and returns the response with its body unread. A reused connection that the server has closed
        meanwhile is opened again. Raises OSError, http.client.HTTPException or Cancelled."""
        reused = self._socket is not None
        try:
            return self._exchange(target, headers, watch)
        except (ConnectionError, http.client.BadStatusLine):
            self.close()
            if not reused:
                raise
        return self._exchange(target, headers, watch)

    def receive(self, response: Response, into: memoryview, watch: ReadWatch) -> int:
        """Fills `into`, which is as long as the announced body, and returns how much of it came before the connection
        ended or stalled. Raises OSError when nothing did, and Cancelled."""
        received = min(len(response.rest), len(into))
        into[:received] = response.rest[:received]
        watch.received += received
        count = self._fill(into, received, watch)
        if count < len(into) or not response.keeps_open:
            self.close()
        return count

    def read(self, response: Response, limit: int, watch: ReadWatch) -> bytes:
        """The first `limit` bytes of a small body, like an error's. The connection stays open only if that is all."""
        length = limit if response.length is None else min(response.length, limit)
        body, part = bytearray(response.rest), memoryview(bytearray(HEAD_BYTES))
        while len(body) < length and not (response.chunked and body.endswith(LAST_CHUNK)):
            count = self._receive_some(part, 0, time.monotonic() + self._patience.stall_s, watch)
            if not count:
                break
            body += part[:count]
        if len(body) != response.length or not response.keeps_open:
            self.close()
        return dechunked(bytes(body)) if response.chunked else bytes(body[:length])

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _exchange(self, target: str, headers: Mapping[str, str], watch: ReadWatch) -> Response:
        if self._socket is None:
            self._connect()
        assert self._socket is not None
        lines = [f"GET {target} HTTP/1.1", f"Host: {self.origin.authority}", "Accept-Encoding: identity"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        return self._receive_head(watch)

    def _connect(self) -> None:
        """Timeouts are the kernel's own, so that a plain socket can wait for a whole chunk in one call (MSG_WAITALL)
        without the interpreter lock, and still looks at its watch once per slice. TLS sockets take no flags."""
        sock = socket.create_connection(self.origin[1:], self._patience.connect_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.origin.scheme == "https":
                assert self._tls is not None
                sock = self._tls.wrap_socket(sock, server_hostname=self.origin.host)
                sock.settimeout(SLICE_S)
            else:
                sock.settimeout(None)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, kernel_time(SLICE_S))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, kernel_time(self._patience.stall_s))
                self._flags = socket.MSG_WAITALL
        except BaseException:
            sock.close()
            raise
        self._socket = sock

    def _receive_head(self, watch: ReadWatch) -> Response:
        head, deadline = bytearray(), time.monotonic() + self._patience.first_byte_s
        part = memoryview(bytearray(HEAD_BYTES))
        while (end := head.find(b"\r\n\r\n")) < 0:
            count = self._receive_some(part, 0, deadline, watch)
            if not count and not head:
                raise http.client.RemoteDisconnected("the server closed the connection without an answer")
            if not count or len(head) > MAX_HEAD_BYTES:
                raise http.client.IncompleteRead(bytes(head[:100]))
            head += part[:count]
        return parse_head(bytes(head[:end]), bytes(head[end + 4 :]))

    def _fill(self, into: memoryview, received: int, watch: ReadWatch) -> int:
        end = time.monotonic() + self._patience.body_s
        while received < len(into):
            deadline = min(end, time.monotonic() + self._patience.stall_s)
            try:
                count = self._receive_some(into[received:], self._flags, deadline, watch)
            except OSError:
                if not received:
                    raise
                break
            if not count:
                break
            received += count
            watch.received += count
        return received

    def _receive_some(self, into: memoryview, flags: int, deadline: float, watch: ReadWatch) -> int:
        """At least one byte, or 0 at the connection's end. Raises Stalled after `deadline`, and Cancelled."""
        assert self._socket is not None
        while True:
            if watch.stop.is_set():
                raise Cancelled
            try:
                return self._socket.recv_into(into, len(into), flags)
            except (BlockingIOError, TimeoutError):
                if time.monotonic() > deadline:
                    raise Stalled("nothing arrived for too long") from None


def parse_head(head: bytes, rest: bytes) -> Response:
    """Raises http.client.BadStatusLine or HTTPException for what isn't an HTTP/1 response."""
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, status = first.partition(" ")
    if not version.startswith("HTTP/1.") or not status[:3].isdigit():
        raise http.client.BadStatusLine(first[:100])
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise http.client.HTTPException(f"not a header line: {line[:100]!r}")
        headers[name.lower()] = value.strip()
    keeps_open = version != "HTTP/1.0" and headers.get("connection", "").lower() != "close"
    return Response(int(status[:3]), headers, rest, keeps_open)


def dechunked(body: bytes) -> bytes:
    """The payload of a body in chunked transfer coding, as far as it is whole."""
    payload, rest = b"", body
    while True:
        size, found, rest = rest.partition(b"\r\n")
        try:
            length = int(size.partition(b";")[0], 16)
        except ValueError:
            return payload
        if not found or not length:
            return payload
        payload, rest = payload + rest[:length], rest[length + 2 :]


def kernel_time(seconds: float) -> bytes:
    """A struct timeval."""
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
