"""The other end of a webhook: a real HTTP server that notes what it gets and answers what the test wants."""

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from standardwebhooks.webhooks import Webhook


@dataclass(frozen=True)
class Call:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    at: float

    @property
    def event(self) -> dict[str, Any]:
        return json.loads(self.body)

    def verified(self, secret: str) -> dict[str, Any]:
        return Webhook(secret).verify(self.body, self.headers)


@dataclass
class Receiver:
    """`answer` gets the number of the call, from 0 on, and gives status and headers."""

    answer: Callable[[int], tuple[int, dict[str, str]]] = lambda _: (200, {})
    calls: list[Call] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?a=1"

    def wait(self, count: int, timeout_s: float = 30) -> list[Call]:
        deadline = time.monotonic() + timeout_s
        while len(self.calls) < count:
            assert time.monotonic() < deadline, f"{len(self.calls)} calls of {count}"
            time.sleep(0.01)
        return self.calls


@contextmanager
def receiving(tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> Iterator[Receiver]:
    receiver, lock = Receiver(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            if len(body := self.rfile.read(length)) < length:
                # The sender died.
                self.close_connection = True
                return
            with lock:
                headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.calls.append(Call("POST", self.path, headers, body, time.time()))
                number = len(receiver.calls) - 1
            status, extra = receiver.answer(number)
            self.send_response(status)
            for name, value in {"content-length": "0", **extra}.items():
                self.send_header(name, value)
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer((host, 0), Handler)
    server.daemon_threads = True
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    receiver.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
