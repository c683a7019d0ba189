"""stoker's queue and its peers, side by side: the same no-op jobs, server (AOF, fsync every second), transport and
process count.

One producer process enqueues `--jobs` jobs; then one worker process (32 at a time, or 8 threads) runs them with
results stored; then single jobs reach the idle worker. Per job, enqueue and processing together: round trips are the
reads that the server processed, server CPU is its main thread's. Every job must have run once, its result be readable.
The peers are installed into venvs under .stoker/bench-peers.
Run: python -m benchmarks.queue [--jobs 5000] [--rounds 3] [--only stoker saq]
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis import Redis

from benchmarks.report import percentile, print_table, save
from benchmarks.venvs import PeerFailed, peer_environment, peer_python
from stoker.queue.embedded import EmbeddedValkey

DATA = Path(".stoker").resolve()
PEERS = Path(__file__).with_name("queue_peers")
REQUIREMENTS: dict[str, list[str]] = {
    "stoker": [],
    "arq": ["arq==0.28.0", "hiredis==3.5.0", "uvloop==0.23.0"],
    "saq": ["saq[hiredis]==0.26.4", "typing-extensions==4.16.0", "hiredis==3.5.0", "uvloop==0.23.0"],
    "rq": ["rq==3.0.0", "redis==8.1.0", "hiredis==3.5.0"],
    "dramatiq": ["dramatiq[redis]==2.2.1", "redis==8.1.0", "hiredis==3.5.0"],
    "taskiq": ["taskiq-redis==1.2.4", "taskiq==0.13.0", "redis==8.1.0", "hiredis==3.5.0", "uvloop==0.23.0"],
}
WARM_UP = 100
REPLY_S = 120.0
IDLE_S = 1.5
METRICS = (
    "enqueue_per_s",
    "process_per_s",
    "round_trips",
    "commands",
    "bytes_in",
    "server_cpu_us",
    "producer_cpu_us",
    "worker_cpu_us",
    "wake_p50_ms",
    "wake_p99_ms",
)


@dataclass(frozen=True, slots=True)
class Counters:
    """The server's own, since its start."""

    reads: int
    commands: int
    bytes_in: int
    cpu_s: float

    @classmethod
    def of(cls, server: "Redis") -> "Counters":
        info: dict[str, Any] = server.info("everything")  # type: ignore[assignment]
        calls = sum(row["calls"] for name, row in info.items() if name.startswith("cmdstat_"))
        cpu = info["used_cpu_sys_main_thread"] + info["used_cpu_user_main_thread"]
        return cls(info["total_reads_processed"], calls, info["total_net_input_bytes"], cpu)


class Peer:
    """One process of a library: orders in, one line of JSON out for each."""

    def __init__(self, python: Path, name: str, role: str, url: str, jobs: int, log: Path) -> None:
        command = [str(python), str(PEERS / f"{name}_peer.py"), role, url, str(jobs)]
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=peer_environment(REQUIREMENTS[name]),
            )

    def ask(self, order: str) -> dict[str, Any]:
        assert self._process.stdin
        try:
            self._process.stdin.write(order + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerFailed(self._tail()) from None
        return self.read()

    def read(self) -> dict[str, Any]:
        assert self._process.stdout
        watchdog = threading.Timer(REPLY_S, self._process.kill)
        watchdog.start()
        line = self._process.stdout.readline()
        watchdog.cancel()
        if not line:
            raise PeerFailed(self._tail())
        return json.loads(line)

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-5:]) or "ended without a word"


def measure(name: str, python: Path, jobs: int, pulses: int) -> dict[str, Any]:
    """One round on a fresh server."""
    folder = DATA / "bench-queue"
    shutil.rmtree(folder, ignore_errors=True)
    server = EmbeddedValkey(folder)
    server.start()
    peers: list[Peer] = []

    def start(role: str) -> Peer:
        peers.append(Peer(python, name, role, server.url, jobs, folder / f"{role}.log"))
        return peers[-1]

    try:
        with Redis.from_url(server.url) as redis:
            return run_round(redis, start, jobs, pulses)
    finally:
        for peer in peers:
            peer.stop()
        server.stop()


def run_round(redis: "Redis", start: Any, jobs: int, pulses: int) -> dict[str, Any]:
    producer: Peer = start("produce")
    producer.read()
    producer.ask(f"warm {WARM_UP}")
    before = Counters.of(redis)
    enqueued = producer.ask(f"enqueue {jobs}")
    between = Counters.of(redis)
    worker: Peer = start("work")
    finished = worker.read()
    after = Counters.of(redis)
    readable = producer.ask("verify")["readable"]
    ran = worker.ask("report")
    time.sleep(IDLE_S)
    worker.ask("forget")
    producer.ask(f"pulse {pulses}")
    time.sleep(IDLE_S)
    waits = [wait / 1000 for wait in worker.ask("report")["waits_us"]]
    valid = readable == ran["executions"] == ran["distinct"] == jobs and len(waits) == pulses
    return {
        "valid": valid,
        "readable": readable,
        "executions": ran["executions"],
        "enqueue_per_s": jobs / enqueued["seconds"],
        "process_per_s": jobs / finished["seconds"],
        **per_job(before, between, after, jobs),
        "producer_cpu_us": enqueued["cpu_s"] / jobs * 1e6,
        "worker_cpu_us": finished["cpu_s"] / jobs * 1e6,
        "wake_p50_ms": percentile(waits, 0.5),
        "wake_p99_ms": percentile(waits, 0.99),
        "load": os.getloadavg()[0],
    }


def per_job(before: Counters, between: Counters, after: Counters, jobs: int) -> dict[str, float]:
    """Enqueue plus processing; the worker also ran the warm-up jobs."""

    def cost(count: Any) -> float:
        return (count(between) - count(before)) / jobs + (count(after) - count(between)) / (jobs + WARM_UP)

    return {
        "round_trips": cost(lambda c: c.reads),
        "commands": cost(lambda c: c.commands),
        "bytes_in": cost(lambda c: c.bytes_in),
        "server_cpu_us": cost(lambda c: c.cpu_s) * 1e6,
        "server_cpu_enqueue_us": (between.cpu_s - before.cpu_s) / jobs * 1e6,
    }


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians; one invalid round makes the row invalid."""
    names = [name for name, value in rounds[0].items() if isinstance(value, float)]
    medians = {name: statistics.median(row[name] for row in rounds) for name in names}
    return {**medians, "valid": all(row["valid"] for row in rounds), "rounds": rounds}


def compare(names: list[str], jobs: int, rounds: int, pulses: int) -> dict[str, Any]:
    """Round by round through all libraries, so that a busy machine is busy for each."""
    pythons: dict[str, Path] = {}
    failures: dict[str, Any] = {}
    measured: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        try:
            pythons[name] = peer_python(name, REQUIREMENTS[name])
        except PeerFailed as failure:
            failures[name] = {"failed": str(failure)}
    for _ in range(rounds):
        for name in [name for name in pythons if name not in failures]:
            try:
                measured.setdefault(name, []).append(measure(name, pythons[name], jobs, pulses))
            except PeerFailed as failure:
                failures[name] = {"failed": str(failure)}
    results = {name: summary(rows) for name, rows in measured.items() if name not in failures}
    return {**results, **failures}


def table_row(name: str, result: dict[str, Any]) -> list[Any]:
    if "failed" in result:
        return [name, "failed: " + result["failed"].splitlines()[-1], *[""] * (len(METRICS) - 1)]
    digits = (0, 0, 3, 1, 0, 1, 1, 1, 2, 2)
    cells = [f"{result[metric]:.{places}f}" for metric, places in zip(METRICS, digits, strict=True)]
    return [name if result["valid"] else f"{name} INVALID", *cells]


def ratio_to_best_peer(results: dict[str, Any]) -> dict[str, Any]:
    peers = {name: row["process_per_s"] for name, row in results.items() if name != "stoker" and row.get("valid")}
    if not peers or "process_per_s" not in results.get("stoker", {}):
        return {}
    best = max(peers, key=peers.__getitem__)
    return {"best_peer": best, "process_ratio": results["stoker"]["process_per_s"] / peers[best]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pulses", type=int, default=200, help="single jobs for the wake latency")
    parser.add_argument("--only", nargs="+", choices=list(REQUIREMENTS), default=list(REQUIREMENTS))
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    results = compare(options.only, options.jobs, options.rounds, options.pulses)
    header = ("queue", "enqueue/s", "process/s", "trips/job", "cmds/job", "bytes in", "server µs", "producer µs")
    rows = [table_row(name, row) for name, row in results.items()]
    print_table("no-op jobs, medians", (*header, "worker µs", "wake p50 ms", "p99 ms"), rows)
    versions = {name: wanted for name, wanted in REQUIREMENTS.items() if name in options.only}
    ratio = ratio_to_best_peer(results)
    print(ratio)
    arguments = {name: value for name, value in vars(options).items() if name != "json"}
    record = {"queues": results, "versions": versions, "load_average": os.getloadavg(), **ratio}
    print("written to", save("queue", arguments, record, options.json))


if __name__ == "__main__":
    main()
