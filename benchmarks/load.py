"""A load generator for streamed chat requests, in a process of its own: a request costs it one small parser, no client
library, so that on the same machine the server is what is measured.

    python -m benchmarks.load < plan.json > results.json

The plan: {"url": ..., "open": N, "requests": [{"at": seconds, "body": {...}}, ...]}. Requests start at their time (in
order), as soon as fewer than `open` are under way. The results: one record per request, in the order of the plan.
"""

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop

CONTENT = re.compile(rb'"content":\s*"[^"]')
USAGE = re.compile(rb'"(prompt_tokens|completion_tokens)":\s*(\d+)')
PATH = "/v1/chat/completions"
# A token may arrive cut in two pieces, the usage too.
TAIL = 4096


@dataclass
class Record:
    """Seconds since the plan's start: due, sent, first and last token; tokens as the server counts them."""

    due: float
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        """From when it was due: a request that had to wait for its turn has waited."""
        return self.first - self.due

    @property
    def itl(self) -> float:
        """Mean time between tokens; they may leave the server several at a time."""
        return (self.last - self.first) / max(1, self.completion_tokens - 1)


class Stream(asyncio.Protocol):
    """One request and its answer, up to the end of the connection."""

    def __init__(self, request: bytes, record: Record, origin: float) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._record = record
        self._origin = origin
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._record.sent = time.perf_counter() - self._origin
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        seen, self._tail = self._tail, (self._tail + data)[-TAIL:]
        if CONTENT.search(seen[-32:] + data):
            self._record.last = time.perf_counter() - self._origin
            self._record.first = self._record.first or self._record.last
        elif not self._record.first and b" 200 " not in seen[:32] + data[:32]:
            self._record.error = (seen + data)[:500].decode(errors="replace")

    def connection_lost(self, exc: Exception | None) -> None:
        found = {name.decode(): int(value) for name, value in USAGE.findall(self._tail)}
        self._record.prompt_tokens = found.get("prompt_tokens", 0)
        self._record.completion_tokens = found.get("completion_tokens", 0)
        if not self._record.completion_tokens and not self._record.error:
            self._record.error = f"the stream ended without a usage record: {exc or self._tail[-200:]!r}"
        self.done.set_result(None)


def http_request(host: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


async def run_plan(url: str, most_open: int, requests: Sequence[dict[str, Any]]) -> list[Record]:
    target = urlsplit(url)
    host, port = str(target.hostname), target.port or 80
    prepared = [http_request(target.netloc, entry["body"]) for entry in requests]
    free = asyncio.Semaphore(most_open)
    origin = time.perf_counter()

    async def one(entry: dict[str, Any], request: bytes) -> Record:
        record = Record(due=entry["at"])
        try:
            loop = asyncio.get_running_loop()
            _, stream = await loop.create_connection(lambda: Stream(request, record, origin), host, port)
            await stream.done
        except OSError as error:
            record.error = str(error)
        finally:
            free.release()
        return record

    tasks: list[asyncio.Task[Record]] = []
    for entry, request in zip(requests, prepared, strict=True):
        await asyncio.sleep(max(0.0, entry["at"] - (time.perf_counter() - origin)))
        await free.acquire()
        tasks.append(asyncio.create_task(one(entry, request)))
    return await asyncio.gather(*tasks)


def generate(url: str, requests: Sequence[dict[str, Any]], most_open: int) -> list[Record]:
    """Runs a plan in another process. Raises SystemExit when a request fails."""
    plan = json.dumps({"url": url, "open": most_open, "requests": requests}).encode()
    done = subprocess.run([sys.executable, "-m", "benchmarks.load"], input=plan, stdout=subprocess.PIPE, check=True)
    records = [Record(**record) for record in json.loads(done.stdout)]
    if failed := [record.error for record in records if record.error]:
        raise SystemExit(f"{len(failed)} of {len(records)} requests failed: {failed[0]}")
    return records


def main() -> None:
    plan = json.load(sys.stdin)
    records = uvloop.run(run_plan(plan["url"], plan["open"], plan["requests"]))
    json.dump([asdict(record) for record in records], sys.stdout)


if __name__ == "__main__":
    main()
