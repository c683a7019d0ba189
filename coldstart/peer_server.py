"""Serves this host's cached chunks to the other hosts of its deployment, and to nobody else."""

import http
import re
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from stoker.coldstart.peer_access import is_authorized

MAX_CONNECTIONS = 64
IDLE_S = 30.0
CHUNK_PATH = re.compile(r"/([0-9a-f]{16})/([0-9a-f]{16}-\d{1,12})")


class PeerServer(ThreadingHTTPServer):
    """GET /<domain>/<checksum>-<length> of the cache in `folder`, signed with `key`. Bytes go from the page cache to
    the socket; the asking side checks them."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path, key: bytes, port: int = 0, host: str = "0.0.0.0") -> None:
        super().__init__((host, port), PeerHandler)
        self.folder, self.key = folder, key
        self.room = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self.served_bytes = 0
        self._counting = threading.Lock()
        self._open: set[socket.socket] = set()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), name="stoker-peers", daemon=True)

    @property
    def port(self) -> int:
        return self.server_address[1]

    def start(self) -> None:
        self._thread.start()

    def count(self, sent: int) -> None:
        with self._counting:
            self.served_bytes += sent

    def close(self) -> None:
        """Cuts what is being served."""
        self.shutdown()
        self._thread.join()
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.server_close()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        if not self.room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self._open.add(request)
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._open.discard(request)
            self.room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that went away has found its bytes elsewhere."""


class PeerHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    disable_nagle_algorithm = True
    server: PeerServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        authorized = is_authorized(self.server.key, self.path, self.headers.get("Authorization", ""), time.time())
        found = CHUNK_PATH.fullmatch(self.path)
        if not authorized:
            return self.refuse(http.HTTPStatus.FORBIDDEN)
        if not found:
            return self.refuse(http.HTTPStatus.NOT_FOUND)
        try:
            with open(self.server.folder / found[1] / found[2], "rb") as file:
                size = file.seek(0, 2)
                self.answer(http.HTTPStatus.OK, size)
                file.seek(0)
                self.server.count(self.connection.sendfile(file))
        except FileNotFoundError:
            self.refuse(http.HTTPStatus.NOT_FOUND)

    def answer(self, status: http.HTTPStatus, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def refuse(self, status: http.HTTPStatus) -> None:
        self.close_connection = status == http.HTTPStatus.FORBIDDEN
        self.answer(status, 0)

    def log_message(self, format: str, *args: object) -> None:
        pass
