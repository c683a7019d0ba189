"""From a request at zero replicas to its first token over HTTP, by where the weights are, with each start's timeline.

Cases: `parked` (pinned host memory, engine process alive), `cached` (page cache, engine process forked for it), `disk`
(evicted from the page cache), `s3` (a loopback server that answers ranged GETs with sendfile), `no-zygote` (as
`cached`, torch imported by the start). Prompts have 512 tokens where the model has one word per token, else a question.
"loaded" is when the last byte was on the device. Beside `disk` stands how fast eight threads read the files past the
page cache, and what the target makes of it: 1.1 times the bytes at that rate and half a second.

Run: python -m benchmarks.coldstart [--model llama3-8b] [--cases cached,disk] [--runs 3] [--trace trace.json]
"""

import argparse
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import httpx
import psutil

from benchmarks.first_token import await_workers, evict, fall_asleep, preload
from benchmarks.models import SHAPES, published
from benchmarks.report import print_table, save, spread
from stoker.coldstart.timeline import Row
from stoker.coldstart.waterfall import bottleneck, trace_events
from stoker.runtime.local import LocalStack

DATA = Path(".stoker")
APP = Path(__file__).with_name("app.py")
CASES = ("parked", "cached", "disk", "s3", "no-zygote")
SHORT, PROMPT_TOKENS = 5, 512
PIECE = 16 << 20


def prompt_of(model: str, tokens: int, seed: int) -> str:
    if model not in SHAPES:
        return f"What is the capital of France? ({seed})"
    words = random.Random(seed)
    return " ".join(f"w{words.randrange(10, SHAPES[model]['vocab_size'])}" for _ in range(tokens))


def first_token(url: str, prompt: str) -> tuple[float, str]:
    """Seconds from sending the request to the first token's arrival, and the job's id."""
    body = {"model": "model", "prompt": prompt, "stream": True, "max_tokens": 2, "temperature": 0}
    seconds = None
    # The client's own start (certificates, a connection) is not what is measured.
    with httpx.Client(base_url=url, timeout=300) as client:
        client.get("/healthz")
        sent = time.perf_counter()
        with client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if seconds is None and has_text(line):
                    seconds = time.perf_counter() - sent
                elif line.startswith("data: {") and "error" in (data := json.loads(line[6:])):
                    raise SystemExit(f"the request failed: {data['error']}")
    if seconds is None:
        raise SystemExit(f"no token arrived (HTTP {response.status_code})")
    return seconds, response.headers["x-job-id"]


def has_text(line: str) -> bool:
    return line.startswith("data: {") and any(choice.get("text") for choice in json.loads(line[6:]).get("choices", []))


@contextmanager
def range_server(weights: str) -> Iterator[str]:
    """An s3:// URL of the published folder, with the environment that reaches it."""
    folder = Path(urlparse(weights).path)
    command = [sys.executable, "-m", "benchmarks.range_server", str(folder.parent.parent)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        port = int(server.stdout.readline())
        os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "x"}
        os.environ |= {"AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
        yield f"s3://{folder.parent.name}/{folder.name}"
    finally:
        server.terminate()
        server.wait()
        server.stdin.close() if server.stdin else None
        server.stdout.close() if server.stdout else None


def raw_disk_rate(weights: str) -> float:
    """GB/s of eight threads that read the largest of the published files with O_DIRECT, 16 MiB at a time."""
    path = max(Path(urlparse(weights).path).glob("*.safetensors"), key=lambda path: path.stat().st_size)
    fd, size = os.open(path, os.O_RDONLY | os.O_DIRECT), path.stat().st_size // PIECE * PIECE
    local = threading.local()

    def read(offset: int) -> int:
        local.buffer = getattr(local, "buffer", None) or mmap.mmap(-1, PIECE)
        return os.preadv(fd, [local.buffer], offset)

    evict(weights)
    began = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        total = sum(pool.map(read, range(0, size, PIECE)))
    os.close(fd)
    return total / 1e9 / (time.perf_counter() - began)


def published_bytes(weights: str) -> int:
    return sum(path.stat().st_size for path in Path(urlparse(weights).path).glob("*.safetensors"))


def kill_zygote(stack: LocalStack) -> None:
    """The next start imports torch by itself."""
    for process in psutil.Process(stack.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "zygote_process" in " ".join(process.cmdline()):
                process.send_signal(signal.SIGKILL)
                process.wait(10)


def measure(stack: LocalStack, case: str, model: str, weights: str, run: int) -> dict[str, Any]:
    fall_asleep(stack)
    evict(weights) if case == "disk" else preload(weights)
    if case == "no-zygote":
        kill_zygote(stack)
    tokens = PROMPT_TOKENS if case != "parked" else SHORT
    seconds, job_id = first_token(stack.url, prompt_of(model, tokens, run))
    with stack.client() as client:
        job = client.job(job_id)
    await_workers(stack, awake=True)
    print(f"  {case} {run}: {seconds:.3f} s, loaded at {loaded_s(job['timeline']):.3f} s", flush=True)
    return {"case": case, "run": run, "seconds": seconds, "timeline": job["timeline"]}


def run_case(case: str, model: str, weights: str, runs: int) -> list[dict[str, Any]]:
    """On a stack of its own, so that no case finds what another one left."""
    with range_server(weights) as remote:
        park = "60" if case == "parked" else "0"
        os.environ |= {"BENCH_WEIGHTS": remote if case == "s3" else weights, "BENCH_IDLE": "1", "STOKER_PARK_S": park}
        os.environ["STOKER_CACHE_GB"] = "0"
        with LocalStack(DATA.resolve() / "bench-coldstart") as stack:
            stack.deploy(APP)
            measure(stack, "cached", model, weights, -1)
            return [measure(stack, case, model, weights, run) for run in range(runs)]


def chrome_trace(results: list[dict[str, Any]]) -> dict[str, Any]:
    """All starts in one trace, each as a process of its own."""
    events = []
    for number, result in enumerate(results):
        rows = [Row(**phase) for phase in result["timeline"]]
        events += trace_events(rows, number, f"{result['case']} {result['run']}")
    return {"traceEvents": events}


def report(model: str, results: list[dict[str, Any]], cases: list[str]) -> None:
    rows = []
    for case in cases:
        seconds = [result["seconds"] for result in results if result["case"] == case]
        loaded = spread([loaded_s(result["timeline"]) for result in results if result["case"] == case])["p50"]
        rows.append((case, min(seconds), spread(seconds)["p50"], max(seconds), loaded))
    print_table(f"request to first token, {model}", ("weights", "min s", "p50 s", "max s", "loaded p50 s"), rows)
    for case in cases:
        last = next(result for result in reversed(results) if result["case"] == case)
        header = ("phase", "from s", "seconds", "GB", "GB/s")
        longest = bottleneck([Row(**phase) for phase in last["timeline"]])
        title = f"timeline, {case}" + (f": most of it is {longest[0]}, {longest[1]:.2f} s" if longest else "")
        print_table(title, header, [phase_row(phase) for phase in last["timeline"]])


def loaded_s(timeline: list[dict[str, Any]]) -> float:
    """NaN: it waited for no load."""
    ends = (phase["start_s"] + phase["seconds"] for phase in timeline if phase["name"] == "upload weights")
    return max(ends, default=float("nan"))


def phase_row(phase: dict[str, Any]) -> tuple[Any, ...]:
    size = (phase["bytes"] or 0) / 1e9
    rate = f"{size / phase['seconds']:.1f}" if size and phase["seconds"] else ""
    return phase["name"], phase["start_s"], phase["seconds"], f"{size:.2f}" if size else "", rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="llama3-8b", help="a shape of benchmarks/models.py, smollm2, or a file:// URL"
    )
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--trace", type=Path, default=None, help="write a Chrome trace of all starts")
    options = parser.parse_args()
    weights, cases = published(options.model, DATA.resolve()), options.cases.split(",")
    results = [result for case in cases for result in run_case(case, options.model, weights, options.runs)]
    report(options.model, results, cases)
    machine = {}
    if "disk" in cases:
        rate, size = raw_disk_rate(weights), published_bytes(weights)
        machine = {"raw_disk_gb_s": rate, "bytes": size, "disk_target_s": 1.1 * size / 1e9 / rate + 0.5}
        print(f"disk: {rate:.2f} GB/s raw; target {machine['disk_target_s']:.2f} s")
    if options.trace:
        options.trace.write_text(json.dumps(chrome_trace(results)))
    arguments = {"model": options.model, "runs": options.runs, "cases": cases}
    print("written to", save("coldstart", arguments | machine, results, options.json))


if __name__ == "__main__":
    main()
