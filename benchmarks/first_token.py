"""Time from a request on zero workers to its first token, with the timeline of where it went.

`cold`: weights evicted from the page cache, no engine process. `warm`: weights in the page cache, no engine process.
`awake`: the worker is ready. Run: python -m benchmarks.first_token [--model smollm2] [--runs 3]
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import httpx

from benchmarks.models import published
from benchmarks.report import print_table, save, spread
from stoker.runtime.local import LocalStack

DATA = Path(".stoker")
APP = Path(__file__).with_name("app.py")
PROMPT = "What is the capital of France?"


def first_token(url: str, prompt: str) -> tuple[float, str]:
    """Seconds from sending the request to the first token's arrival, and the job's id."""
    body = {"model": "model", "messages": [{"role": "user", "content": prompt}], "stream": True, "max_tokens": 8}
    sent = time.perf_counter()
    seconds = None
    with httpx.stream("POST", f"{url}/v1/chat/completions", json={**body, "temperature": 0}, timeout=300) as response:
        for line in response.iter_lines():
            if seconds is None and has_token(line):
                seconds = time.perf_counter() - sent
    if seconds is None:
        raise SystemExit(f"no token arrived (HTTP {response.status_code})")
    return seconds, response.headers["x-job-id"]


def has_token(line: str) -> bool:
    if not line.startswith("data: {"):
        return False
    return any(choice["delta"].get("content") for choice in json.loads(line[6:]).get("choices", []))


def evict(weights: str) -> None:
    """Drops the published files from the page cache (the host below may still hold them)."""
    for path in Path(urlparse(weights).path).glob("*.safetensors"):
        with open(path, "rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def preload(weights: str) -> None:
    def read(path: Path) -> None:
        with open(path, "rb", buffering=0) as file:
            while file.read(16 << 20):
                pass

    with ThreadPoolExecutor() as pool:
        list(pool.map(read, Path(urlparse(weights).path).glob("*.safetensors")))


def fall_asleep(stack: LocalStack) -> None:
    await_workers(stack, awake=False)
    time.sleep(0.5)


def await_workers(stack: LocalStack, awake: bool) -> None:
    """What a gateway shows is a moment old: after an answer, wait until it has seen the worker, or it seems asleep."""
    deadline = time.monotonic() + 60
    with stack.client() as client:
        while any(row["replicas"] for row in client.functions()) != awake:
            if time.monotonic() > deadline:
                raise SystemExit(f"the worker did not {'show up' if awake else 'go to sleep'} within 60 s")
            time.sleep(0.02)


def measure(stack: LocalStack, kind: str, weights: str, run: int) -> dict[str, Any]:
    if kind != "awake":
        fall_asleep(stack)
        evict(weights) if kind == "cold" else preload(weights)
    seconds, job_id = first_token(stack.url, f"{PROMPT} ({kind} {run})")
    with stack.client() as client:
        timeline = client.job(job_id)["timeline"]
    await_workers(stack, awake=True)
    return {"kind": kind, "seconds": seconds, "timeline": timeline}


def runs(stack: LocalStack, weights: str, count: int) -> Iterator[dict[str, Any]]:
    measure(stack, "warm", weights, -1)
    for run in range(count):
        for kind in ("cold", "warm", "awake"):
            yield measure(stack, kind, weights, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, a shape of benchmarks/models.py, or a store URL")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    weights = published(options.model, DATA.resolve())
    os.environ |= {"BENCH_WEIGHTS": weights, "BENCH_IDLE": "1"}
    with LocalStack(DATA.resolve() / "bench") as stack:
        stack.deploy(APP)
        results = list(runs(stack, weights, options.runs))
    kinds = {kind: [r["seconds"] for r in results if r["kind"] == kind] for kind in ("cold", "warm", "awake")}
    rows = [(kind, min(s), spread(s)["p50"], max(s)) for kind, s in kinds.items()]
    print_table(f"first token, {options.model}, {options.runs} runs", ("start", "min s", "p50 s", "max s"), rows)
    for kind in ("cold", "warm"):
        last = next(r for r in reversed(results) if r["kind"] == kind)
        phases = [(p["name"], p["start_s"], p["seconds"], p["bytes"] or "") for p in last["timeline"]]
        print_table(f"timeline of the last {kind} start", ("phase", "from s", "seconds", "bytes"), phases)
    arguments = {"model": options.model, "runs": options.runs}
    print("written to", save("first_token", arguments, results, options.json))


if __name__ == "__main__":
    main()
