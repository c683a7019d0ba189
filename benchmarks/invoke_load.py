"""The load of `benchmarks.invoke` where there is no wrk: the same requests, the same line of JSON.

Run by the benchmark: python -m benchmarks.invoke_load URL CONNECTIONS SECONDS
"""

import asyncio
import json
import sys
import time
from typing import Any
from urllib.parse import urlsplit

import uvloop

from benchmarks.report import percentile

BODY = b'{"x":1}'


class Connection(asyncio.Protocol):
    """Sends a request, reads its answer, sends the next, until `ends_at`."""

    def __init__(self, request: bytes, ends_at: float, waits_ms: list[float]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failed = 0
        self._request = request
        self._ends_at = ends_at
        self._waits_ms = waits_ms
        self._answer = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        self._answer += data
        head, found, body = self._answer.partition(b"\r\n\r\n")
        if not found or len(body) < length_of(head):
            return
        now = time.perf_counter()
        self._answer = b""
        self._waits_ms.append((now - self._sent_at) * 1000)
        self.failed += b" 200 " not in head[:16]
        if now < self._ends_at:
            self._send()
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.failed += time.perf_counter() < self._ends_at
        self.ended.set_result(None)

    def _send(self) -> None:
        self._sent_at = time.perf_counter()
        self._transport.write(self._request)


def length_of(head: bytes) -> int:
    _, _, rest = head.lower().partition(b"content-length:")
    return int(rest.split(b"\r\n", 1)[0])


async def run(url: str, connections: int, seconds: float) -> dict[str, Any]:
    target = urlsplit(url)
    head = f"POST {target.path} HTTP/1.1\r\nHost: {target.netloc}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY
    started, waits_ms = time.perf_counter(), []
    loop = asyncio.get_running_loop()
    opened = [
        await loop.create_connection(
            lambda: Connection(request, started + seconds, waits_ms), target.hostname, target.port
        )
        for _ in range(connections)
    ]
    await asyncio.gather(*(connection.ended for _, connection in opened))
    return {
        "requests": len(waits_ms),
        "seconds": time.perf_counter() - started,
        "failed": sum(connection.failed for _, connection in opened),
        "p50_ms": percentile(waits_ms, 0.5),
        "p99_ms": percentile(waits_ms, 0.99),
    }


if __name__ == "__main__":
    url, connections, seconds = sys.argv[1:]
    print(json.dumps(uvloop.run(run(url, int(connections), float(seconds)))))
