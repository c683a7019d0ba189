"""An S3 endpoint that breaks its promises on request."""

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from stoker.coldstart.manifest import Manifest

BUCKET = "models"
ERROR = "<Error><Code>{}</Code><Message>injected</Message><RequestId>req-7</RequestId></Error>"
ERROR_CODES = {
    "403": (403, "AccessDenied"),
    "expired": (403, "ExpiredToken"),
    "404": (404, "NoSuchKey"),
    "412": (412, "PreconditionFailed"),
    "429": (429, "TooManyRequests"),
    "500": (500, "InternalError"),
    "503": (503, "SlowDown"),
}
CRAWL_BYTES_PER_S = 10_000


class FaultServer(ThreadingHTTPServer):
    """Serves `objects` as S3 does. `faults` are used up one per ranged request; `always` applies when none is left."""

    daemon_threads = True

    def __init__(self, address: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__((address, port), FaultHandler)
        self.objects: dict[str, bytes] = {}
        self.etags: dict[str, str] = {}
        self.faults: deque[str] = deque()
        self.always = ""
        self.ranges: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.on_range: Callable[[int], None] = lambda count: None
        self.admits: Callable[[str], bool] = lambda target: True
        self.resume = threading.Event()
        self.connections = 0
        self.crawled = 0

    def get_request(self) -> tuple[socket.socket, Any]:
        self.connections += 1
        return super().get_request()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is what these tests are about."""

    def hold(self, folder: Path, manifest: Manifest) -> None:
        """Serves a store folder under the bucket's root, with the ETags its manifest lists."""
        entries = {entry.name: entry for entry in [*manifest.files, *manifest.documents.values()]}
        for path in folder.iterdir():
            self.objects[path.name] = path.read_bytes()
            self.etags[path.name] = entries[path.name].etag if path.name in entries else '"manifest"'


class FaultHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].removeprefix(f"/{BUCKET}/")
        if "list-type=2" in self.path:
            return self.answer(200, self.listing(), {"Content-Type": "application/xml"})
        data, etag = self.server.objects.get(path), self.server.etags.get(path, "")
        if data is None:
            return self.refuse("404")
        if "Range" not in self.headers:
            return self.answer(200, data, {"ETag": etag})
        self.server.ranges.append((path, self.headers["Range"]))
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        self.server.on_range(len(self.server.ranges))
        fault = self.server.faults.popleft() if self.server.faults else self.server.always
        etag = self.server.etags[path]
        if fault in ERROR_CODES:
            return self.refuse(fault)
        if not self.server.admits(self.path):
            return self.refuse("expired")
        if self.headers.get("If-Match", etag) != etag:
            return self.refuse("412")
        start, end = (int(number) for number in self.headers["Range"].removeprefix("bytes=").split("-"))
        part = self.server.objects[path][start : end + 1]
        headers = {"ETag": etag, "Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(data)}"}
        getattr(self, f"send_{fault.replace('-', '_')}", self.send_right)(part, headers)

    def listing(self) -> bytes:
        """The bucket's root in one page."""
        entry = "<Contents><Key>{}</Key><Size>{}</Size><ETag>{}</ETag></Contents>"
        etags, objects = self.server.etags, sorted(self.server.objects.items())
        entries = [entry.format(name, len(data), etags.get(name, "")) for name, data in objects]
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(entries)}</ListBucketResult>".encode()

    def send_right(self, part: bytes, headers: dict[str, str]) -> None:
        self.answer(206, part, headers)

    def send_flip(self, part: bytes, headers: dict[str, str]) -> None:
        self.answer(206, bytes([part[0] ^ 1]) + part[1:], headers)

    def send_truncate(self, part: bytes, headers: dict[str, str]) -> None:
        self.answer(206, part, headers, sent=len(part) // 2)

    def send_nothing(self, part: bytes, headers: dict[str, str]) -> None:
        self.answer(206, part, headers, sent=0)

    def send_short_length(self, part: bytes, headers: dict[str, str]) -> None:
        self.answer(206, part[:-1], headers)

    def send_wrong_range(self, part: bytes, headers: dict[str, str]) -> None:
        self.answer(206, part, {**headers, "Content-Range": f"bytes 1-{len(part)}/99999999"})

    def send_whole(self, part: bytes, headers: dict[str, str]) -> None:
        self.answer(200, part, headers)

    def send_gzip(self, part: bytes, headers: dict[str, str]) -> None:
        self.answer(206, part, {**headers, "Content-Encoding": "gzip"})

    def send_other_etag(self, part: bytes, headers: dict[str, str]) -> None:
        self.answer(206, part, {**headers, "ETag": '"other"'})

    def send_reset(self, part: bytes, headers: dict[str, str]) -> None:
        self.answer(206, part, headers, sent=len(part) // 2)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.shutdown(socket.SHUT_RD)

    def send_hang_up(self, part: bytes, headers: dict[str, str]) -> None:
        self.close_connection = True

    def send_stall(self, part: bytes, headers: dict[str, str]) -> None:
        self.answer(206, part, headers, sent=len(part) // 2)
        self.server.resume.wait(60)

    def send_silence(self, part: bytes, headers: dict[str, str]) -> None:
        self.server.resume.wait(60)
        self.close_connection = True

    def send_drip(self, part: bytes, headers: dict[str, str]) -> None:
        """Header and body in small pieces, so that no piece boundary falls where the reader expects one."""
        self.answer(206, part, headers, sent=0)
        self.close_connection = False
        for start in range(0, len(part), 1000):
            self.wfile.write(part[start : start + 1000])
            self.wfile.flush()

    def send_crawl(self, part: bytes, headers: dict[str, str]) -> None:
        """10 KB/s, until the client has had enough."""
        self.answer(206, part, headers, sent=0)
        for start in range(0, len(part), CRAWL_BYTES_PER_S // 10):
            self.wfile.write(part[start : start + CRAWL_BYTES_PER_S // 10])
            self.wfile.flush()
            self.server.crawled += CRAWL_BYTES_PER_S // 10
            time.sleep(0.1)

    def send_goodbye(self, part: bytes, headers: dict[str, str]) -> None:
        self.answer(206, part, {**headers, "Connection": "close"})

    def refuse(self, fault: str) -> None:
        status, code = ERROR_CODES[fault]
        self.answer(status, ERROR.format(code).encode(), {})

    def answer(self, status: int, body: bytes, headers: dict[str, str], sent: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "Accept-Ranges": "bytes", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body if sent is None else body[:sent])
        self.wfile.flush()
        self.close_connection = self.close_connection or sent is not None


def serving(server: FaultServer) -> Iterator[FaultServer]:
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.resume.set()
    server.shutdown()
    thread.join()
