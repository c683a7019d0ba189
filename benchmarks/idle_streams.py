"""What many idle event streams cost one gateway: memory and CPU, with all of them open and nothing to tell.

Every stream waits for a job of its own that no worker takes, so the gateway writes a comment to each whenever it was
silent for as long as proxies like, and looks after each job in the queue.
Run: python -m benchmarks.idle_streams [--streams 5000] [--seconds 20]
"""

import argparse
import asyncio
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvloop

from benchmarks.report import print_table, save
from stoker.queue.client import connect
from stoker.queue.cluster import Cluster
from stoker.queue.embedded import EmbeddedValkey
from stoker.runtime.spec import FunctionSpec

DATA = Path(".stoker").resolve()
FUNCTION = "never"
START_S = 30.0
OPENING_AT_ONCE = 50
COMMENT = b"\n: "


class Stream(asyncio.Protocol):
    """One client. `opened` when the first comment has come; `gone` when the gateway has closed it."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._told = b""
        self.comments = 0
        self.gone = False
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.comments += (self._told + data).count(COMMENT)
        self._told = data[-2:]
        if self.comments and not self.opened.done():
            self.opened.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        if not self.opened.done():
            self.opened.set_exception(ConnectionError("closed before its first comment"))


def request(port: int) -> bytes:
    head = f"POST /v1/functions/{FUNCTION} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAccept: text/event-stream\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: 1\r\n\r\n1".encode()


@contextmanager
def gateway(url: str, port: int) -> Iterator[psutil.Process]:
    command = [sys.executable, "-m", "stoker.runtime.cli", "gateway", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen([*command, "--redis", url, "--store", (DATA / "store").as_uri()])
    try:
        wait_for(f"http://127.0.0.1:{port}/readyz")
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def wait_for(url: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.1)
    raise SystemExit("the gateway did not start")


async def deploy(url: str) -> None:
    client = connect(url)
    spec = FunctionSpec(name=FUNCTION, kind="python", entry="app:never", code="0" * 64, version="1")
    await Cluster(client).put_function(FUNCTION, spec.to_dict())
    await client.aclose()


async def measure(process: psutil.Process, port: int, count: int, seconds: float) -> dict[str, Any]:
    """Memory in MB; the CPU is what the open streams take, in cores."""
    loop, turn = asyncio.get_running_loop(), asyncio.Semaphore(OPENING_AT_ONCE)

    async def opened() -> Stream:
        async with turn:
            _, stream = await loop.create_connection(lambda: Stream(request(port)), "127.0.0.1", port)
            return stream

    before, started = process.memory_info().rss, time.monotonic()
    streams = await asyncio.gather(*(opened() for _ in range(count)))
    await asyncio.gather(*(stream.opened for stream in streams))
    took, spent, told = time.monotonic() - started, process.cpu_times(), sum(stream.comments for stream in streams)
    await asyncio.sleep(seconds)
    after = process.cpu_times()
    rss = process.memory_info().rss
    return {
        "streams": count,
        "valid": not any(stream.gone for stream in streams),
        "open_s": took,
        "rss_mb": rss / 1e6,
        "rss_before_mb": before / 1e6,
        "kb_per_stream": (rss - before) / count / 1e3,
        "cores": (after.user + after.system - spent.user - spent.system) / seconds,
        "comments_per_s": (sum(stream.comments for stream in streams) - told) / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[500, 5000])
    parser.add_argument("--seconds", type=float, default=20.0, help="how long they stay open")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    folder = DATA / "bench-idle"
    shutil.rmtree(folder, ignore_errors=True)
    server, results = EmbeddedValkey(folder), []
    server.start()
    try:
        asyncio.run(deploy(server.url))
        for count in options.streams:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            with gateway(server.url, port) as process, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                results.append(runner.run(measure(process, port, count, options.seconds)))
    finally:
        server.stop()
    print_table("idle event streams", list(results[0]), [list(row.values()) for row in results])
    arguments = {name: value for name, value in vars(options).items() if name != "json"}
    record = {"rows": results, "load_average": os.getloadavg()}
    print("written to", save("idle_streams", arguments, record, options.json))


if __name__ == "__main__":
    main()
