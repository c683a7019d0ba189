"""A folder as a bucket: ranged GETs over plain HTTP, each answered with sendfile. An upper limit of what S3 can give.

Run: python -m benchmarks.range_server FOLDER   (prints its port; ends with its standard input)
"""

import os
import re
import socketserver
import sys
import threading
from contextlib import suppress
from pathlib import Path

# A path, or a whole address as some clients send it.
REQUEST = re.compile(rb"(GET|HEAD) (?:http://[^/ ]*)?/([^ ?]*)\S* HTTP/1\.1\r\n", re.IGNORECASE)
RANGE = re.compile(rb"\r\nrange: *bytes=(\d+)-(\d*)\r\n", re.IGNORECASE)
MISSING = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


class Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        with suppress(OSError):
            while head := self.read_head():
                self.answer(head)

    def read_head(self) -> bytes:
        lines = []
        while (line := self.rfile.readline()) not in (b"\r\n", b""):
            lines.append(line)
        return b"".join([*lines, b"\r\n"]) if lines else b""

    def answer(self, head: bytes) -> None:
        request = REQUEST.match(head)
        assert request, head
        path: Path = self.server.folder / request[2].decode()  # type: ignore[attr-defined]
        if not path.is_file():
            self.request.sendall(MISSING)
            return
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            wanted = RANGE.search(head)
            start, stop = (int(wanted[1]), min(int(wanted[2] or size) + 1, size)) if wanted else (0, size)
            self.request.sendall(head_of(size, start, stop, bool(wanted)))
            while request[1] == b"GET" and start < stop:
                start += os.sendfile(self.request.fileno(), file.fileno(), start, stop - start)


def head_of(size: int, start: int, stop: int, partial: bool) -> bytes:
    lines = ["HTTP/1.1 206 Partial Content" if partial else "HTTP/1.1 200 OK"]
    lines += [f"Content-Length: {stop - start}", f'ETag: "{size:x}"', "Accept-Ranges: bytes"]
    lines += [f"Content-Range: bytes {start}-{stop - 1}/{size}"] if partial else []
    return "\r\n".join([*lines, "", ""]).encode()


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        super().__init__(("127.0.0.1", 0), Handler)


def main() -> None:
    server = Server(Path(sys.argv[1]).resolve())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
