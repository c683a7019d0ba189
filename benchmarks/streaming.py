"""What the path from a token to the client adds: emit, queue, gateway, client's socket; and the CPU that it takes.

One real gateway process, one agent-side process that replays tokens (`streaming_worker`), one embedded server, and this
process as all the clients. Latency: from the moment a step's tokens are handed to the agent's outbox to the moment the
client reads them. CPU: user and system time of gateway and agent while all streams run, in cores. Left to itself, a
kernel with two cores often runs gateway and server in turns on one of them while the other idles; with --apart the
gateway has a core for itself, and everything else the rest.
Run: python -m benchmarks.streaming [--streams 200] [--rate 50] [--tokens 500] [--engines 1 4] [--apart]
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvloop

from benchmarks.models import published
from benchmarks.report import percentile, print_table, save
from stoker.queue.client import connect
from stoker.queue.cluster import Cluster
from stoker.queue.embedded import EmbeddedValkey
from stoker.runtime.spec import FunctionSpec

DATA = Path(".stoker").resolve()
FUNCTION = "replayed"
TOKEN = re.compile(rb'"content":"(\d+):(\d+) "')
WARM_UP_TOKENS = 25
START_S = 30.0


class Stream(asyncio.Protocol):
    """One client: sends a request and keeps every piece of the answer with its time of arrival."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.pieces: list[tuple[int, bytes]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.monotonic_ns(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def tokens(self) -> list[tuple[int, float]]:
        """(number, milliseconds from emit to arrival) in order of arrival."""
        ends, size = [], 0
        for _, data in self.pieces:
            size += len(data)
            ends.append(size)
        found, piece = [], 0
        for match in TOKEN.finditer(b"".join(data for _, data in self.pieces)):
            while ends[piece] < match.end():
                piece += 1
            found.append((int(match[1]), (self.pieces[piece][0] - int(match[2])) / 1e6))
        return found


class Usage:
    """CPU seconds of processes between two moments."""

    def __init__(self, **pids: int) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self._before = self._read()
        self._at = time.monotonic()

    def cores(self) -> dict[str, float]:
        elapsed = time.monotonic() - self._at
        return {name: (seconds - self._before[name]) / elapsed for name, seconds in self._read().items()}

    def _read(self) -> dict[str, float]:
        times = {name: process.cpu_times() for name, process in self._processes.items()}
        return {name: spent.user + spent.system for name, spent in times.items()}


def request(port: int) -> bytes:
    body = {"model": FUNCTION, "messages": [{"role": "user", "content": "w1 w2"}], "stream": True, "max_tokens": 1000}
    data = json.dumps(body).encode()
    lines = ("POST /v1/chat/completions HTTP/1.1", f"Host: 127.0.0.1:{port}", "Content-Type: application/json")
    return "\r\n".join([*lines, f"Content-Length: {len(data)}", "Connection: close", "", ""]).encode() + data


async def measure(server: EmbeddedValkey, gateway: int, port: int, options: argparse.Namespace, engines: int) -> Any:
    numbers = (options.streams, options.tokens, options.rate, engines)
    command = [sys.executable, "-m", "benchmarks.streaming_worker", server.url, FUNCTION, *map(str, numbers)]
    with subprocess.Popen(command) as agent:
        loop = asyncio.get_running_loop()
        opened = [loop.create_connection(lambda: Stream(request(port)), "127.0.0.1", port) for _ in range(numbers[0])]
        streams = [protocol for _, protocol in await asyncio.gather(*opened)]
        while not all(len(stream.pieces) > WARM_UP_TOKENS for stream in streams):
            await asyncio.sleep(0.05)
            if agent.poll():
                raise SystemExit("the replaying worker failed")
        assert server.pid
        usage = Usage(gateway=gateway, agent=agent.pid, server=server.pid, clients=os.getpid())
        await asyncio.sleep((options.tokens - 2 * WARM_UP_TOKENS) / options.rate)
        cores = usage.cores()
        await asyncio.gather(*(stream.ended for stream in streams))
    return result(engines, [stream.tokens() for stream in streams], cores, options.tokens)


def result(engines: int, streams: list[list[tuple[int, float]]], cores: dict[str, float], tokens: int) -> Any:
    complete = all([number for number, _ in stream] == list(range(1, tokens + 1)) for stream in streams)
    delays = [delay for stream in streams for number, delay in stream if number > WARM_UP_TOKENS]
    return {
        "engines": engines,
        "valid": complete,
        "tokens": sum(map(len, streams)),
        "latency_ms": {f"p{share * 100:g}": percentile(delays, share) for share in (0.5, 0.95, 0.99, 1.0)},
        "cores": cores,
        "gateway_and_agent_cores": cores["gateway"] + cores["agent"],
        "load_average": os.getloadavg()[0],
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def deploy(url: str) -> None:
    client = connect(url)
    spec = FunctionSpec(name=FUNCTION, kind="llm", weights=published("tiny", DATA), version="1")
    await Cluster(client).put_function(FUNCTION, spec.to_dict())
    await client.aclose()


async def ready(port: int) -> None:
    deadline = time.monotonic() + START_S
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        while time.monotonic() < deadline:
            try:
                (await client.get("/readyz")).raise_for_status()
                return
            except httpx.HTTPError:
                await asyncio.sleep(0.1)
    raise SystemExit("the gateway did not start")


def keep_apart(gateway: int, *others: int | None) -> None:
    """`others`, and this process with what it will start, on all cores but the gateway's."""
    first, *rest = sorted(os.sched_getaffinity(0))
    for pid, cores in [(gateway, {first}), *((pid, set(rest)) for pid in (*others, os.getpid()) if pid)]:
        for thread in psutil.Process(pid).threads():
            os.sched_setaffinity(thread.id, cores)


async def measure_all(server: EmbeddedValkey, options: argparse.Namespace) -> list[Any]:
    await deploy(server.url)
    port = free_port()
    command = [sys.executable, "-m", "stoker.runtime.cli", "gateway", "--host", "127.0.0.1", "--port", str(port)]
    store = (DATA / "store").as_uri()
    gateway = subprocess.Popen([*command, "--redis", server.url, "--store", store])
    try:
        await ready(port)
        if options.apart:
            keep_apart(gateway.pid, server.pid)
        rounds = [engines for _ in range(options.rounds) for engines in options.engines]
        return [await measure(server, gateway.pid, port, options, engines) for engines in rounds]
    finally:
        gateway.terminate()
        gateway.wait()


def rows(results: Sequence[Any]) -> list[Any]:
    names = ("engines", "valid", "gateway_and_agent_cores")
    return [(*(row[name] for name in names), *row["latency_ms"].values(), *row["cores"].values()) for row in results]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--rate", type=float, default=50.0, help="tokens per second of each stream")
    parser.add_argument("--tokens", type=int, default=500, help="of each stream")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 4], help="engines that share the streams")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--apart", action="store_true", help="the gateway on a core of its own")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    folder = DATA / "bench-streaming"
    shutil.rmtree(folder, ignore_errors=True)
    server = EmbeddedValkey(folder)
    server.start()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            results = runner.run(measure_all(server, options))
    finally:
        server.stop()
    header = (
        "engines",
        "valid",
        "gateway+agent",
        "p50 ms",
        "p95",
        "p99",
        "max",
        "gateway",
        "agent",
        "server",
        "clients",
    )
    print_table(
        f"{options.streams} streams, {options.rate:g} tokens/s each; CPU in cores, sum of gateway and agent",
        header,
        rows(results),
    )
    arguments = {name: value for name, value in vars(options).items() if name != "json"}
    print("written to", save("streaming", arguments, results, options.json))


if __name__ == "__main__":
    main()
