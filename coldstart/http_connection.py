"""A keep-alive HTTP/1.1 connection that receives bodies straight into the caller's memory."""

import http.client
import math
import select
import socket
import ssl
import struct
import time
from collections.abc import Mapping
from typing import NamedTuple

from stoker.coldstart.store import ReadWatch

# How long a blocked receive may ignore `ReadWatch.stop`.
SLICE_S = 0.25


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


class Stalled(OSError):
    """Nothing arrived for too long."""


class Cancelled(Exception):
    """The read's owner doesn't want it any more."""


class HttpConnection:
    """For one thread at a time; to be closed after an exception."""

    def __init__(self, origin: Origin, tls: ssl.SSLContext | None, patience: Patience) -> None:
        self.origin = origin
        self._patience = patience
        if origin.scheme == "https":
            self._http = http.client.HTTPSConnection(origin.host, origin.port, timeout=patience.connect_s, context=tls)
        else:
            self._http = http.client.HTTPConnection(origin.host, origin.port, timeout=patience.connect_s)
        self._socket: socket.socket | None = None
        self._response: http.client.HTTPResponse | None = None

    def request(self, target: str, headers: Mapping[str, str], watch: ReadWatch) -> http.client.HTTPResponse:
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

    def receive(self, response: http.client.HTTPResponse, into: memoryview, watch: ReadWatch) -> int:
        """Fills `into` from the body and returns its length, or less when the body ended early. Raises OSError when
        nothing arrived, and Cancelled."""
        sock = self._socket
        assert sock is not None
        count = receive(sock, into, receive_buffered(sock, response, into), watch, self._patience)
        response.close()
        if response.will_close or count < len(into):
            self.close()
        return count

    def close(self) -> None:
        if self._response is not None:
            self._response.close()
        self._http.close()
        self._socket = self._response = None

    def _exchange(self, target: str, headers: Mapping[str, str], watch: ReadWatch) -> http.client.HTTPResponse:
        sock = self._socket or self._connect()
        sock.settimeout(self._patience.stall_s)
        self._http.request("GET", target, headers=dict(headers))
        wait_readable(sock, watch, self._patience.first_byte_s)
        self._response = self._http.getresponse()
        return self._response

    def _connect(self) -> socket.socket:
        self._http.connect()
        self._socket = self._http.sock
        assert self._socket is not None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._socket


def wait_readable(sock: socket.socket, watch: ReadWatch, patience_s: float) -> None:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    deadline = time.monotonic() + patience_s
    while not poll.poll(SLICE_S * 1000):
        check_progress(deadline, watch)


def receive_buffered(sock: socket.socket, response: http.client.HTTPResponse, into: memoryview) -> int:
    """What the header parser has read past the headers."""
    sock.settimeout(SLICE_S)
    try:
        return response.fp.readinto1(into)  # type: ignore[attr-defined]
    except TimeoutError:
        return 0


def receive(sock: socket.socket, into: memoryview, received: int, watch: ReadWatch, patience: Patience) -> int:
    """Wakes up at least once per slice to look at `watch`. Returns less than asked when the connection ended or
    stalled after something had arrived; raises OSError when nothing had."""
    flags = receive_flags(sock)
    watch.received += received
    end = time.monotonic() + patience.body_s
    deadline = min(end, time.monotonic() + patience.stall_s)
    while received < len(into):
        rest = into[received:]
        try:
            count = receive_slice(sock, rest, flags)
            if count is None:
                check_progress(deadline, watch)
                continue
        except OSError:
            if not received:
                raise
            break
        if not count:
            break
        received, deadline = received + count, min(end, time.monotonic() + patience.stall_s)
        watch.received += count
        check_progress(deadline, watch)
    return received


def receive_slice(sock: socket.socket, into: memoryview, flags: int) -> int | None:
    """None when nothing came within the slice."""
    try:
        return sock.recv_into(into, len(into), flags)
    except (BlockingIOError, TimeoutError):
        return None


def receive_flags(sock: socket.socket) -> int:
    """MSG_WAITALL hands the whole wait to the kernel: one call per slice, without the interpreter lock. It needs a
    blocking socket, so the slice is the kernel's own receive timeout. TLS sockets take no flags."""
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(SLICE_S)
        return 0
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(SLICE_S * 1e6)))
    return socket.MSG_WAITALL


def check_progress(deadline: float, watch: ReadWatch) -> None:
    if watch.stop.is_set():
        raise Cancelled
    if time.monotonic() > deadline:
        raise Stalled("nothing arrived for too long")
