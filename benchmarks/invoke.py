"""Invocations per second of a function that does nothing, end to end over HTTP: stoker and its peers, side by side.

POST {"x":1}, answer {"y":1}, `--connections` keep-alive connections, one gateway and one worker process of each, on
`--cores` cores for everything, the load included. stoker, SAQ and arq go through a queue on an own Valkey (AOF, fsync
every second); LitServe has none. CPU is user and system time of each process per request, which a busy machine leaves
as it is. The load is wrk's where it is installed, else `benchmarks.invoke_load`. A warm-up precedes each round.
Run: python -m benchmarks.invoke [--seconds 10] [--rounds 2] [--only stoker saq]
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.report import print_table, save
from benchmarks.venvs import PeerFailed, peer_environment, peer_python
from stoker.queue.embedded import EmbeddedValkey
from stoker.runtime.local import LocalStack

DATA = Path(".stoker").resolve()
HERE = Path(__file__).parent
WEB = ["starlette==1.10.0", "uvicorn==0.54.0", "uvloop==0.23.0", "httptools==0.9.0"]
REQUIREMENTS: dict[str, list[str]] = {
    "stoker": [],
    "saq": ["saq[hiredis]==0.26.4", "typing-extensions==4.16.0", "hiredis==3.5.0", *WEB],
    "arq": ["arq==0.28.0", "hiredis==3.5.0", *WEB],
    "litserve": ["litserve==0.2.19", *WEB],
}
START_S = 60.0
WARM_UP_S = 2.0
CPU_COLUMNS = ("gateway", "server", "agent", "function", "others", "load")
ROLES = {
    "cli gateway": "gateway",
    "cli worker": "agent",
    "stoker-function": "function",
    "valkey-server": "server",
    " web ": "gateway",
    " worker ": "function",
}


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send requests, and the process above all of the target's."""

    url: str
    root: psutil.Process


@contextmanager
def stoker_stack(python: Path) -> Iterator[Target]:
    folder = DATA / "bench-invoke"
    shutil.rmtree(folder, ignore_errors=True)
    with LocalStack(folder) as stack:
        stack.deploy(HERE / "invoke_app.py")
        yield Target(f"{stack.url}/v1/functions/noop", psutil.Process(stack.pid))


@contextmanager
def peer_stack(name: str, python: Path) -> Iterator[Target]:
    """A web process, and a worker and a server where the peer has them; all children of this process."""
    folder, port = DATA / "bench-invoke", free_port()
    shutil.rmtree(folder, ignore_errors=True)
    with ExitStack() as stack:
        server = EmbeddedValkey(folder)
        if name != "litserve":
            server.start()
            stack.callback(server.stop)
        folder.mkdir(parents=True, exist_ok=True)
        for role in ["web"] if name == "litserve" else ["worker", "web"]:
            command = [str(python), str(HERE / "invoke_peers" / f"{name}_peer.py"), role, server.url, str(port)]
            with (folder / f"{role}.log").open("ab") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log, env=peer_environment(REQUIREMENTS[name]))
            stack.callback(stop_tree, process)
        yield Target(f"http://127.0.0.1:{port}/", psutil.Process())


def stop_tree(process: subprocess.Popen[bytes]) -> None:
    children = psutil.Process(process.pid).children(recursive=True)
    for each in [process, *children]:
        each.kill()
    process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(url: str) -> bool:
    try:
        reply = httpx.post(url, json={"x": 1}, timeout=5)
    except httpx.HTTPError:
        return False
    return reply.status_code == 200 and reply.json() == {"y": 1}


def wait_for(url: str) -> None:
    deadline = time.monotonic() + START_S
    while not answers(url):
        if time.monotonic() > deadline:
            raise PeerFailed("does not answer {'x': 1} with {'y': 1}")
        time.sleep(0.2)


class Usage:
    """CPU seconds of a target's processes by role since `start`."""

    def __init__(self, root: psutil.Process) -> None:
        self._processes = [(role_of(process), process) for process in root.children(recursive=True)]
        self._before = self._read()

    def spent(self) -> dict[str, float]:
        after = self._read()
        return {role: seconds - self._before[role] for role, seconds in after.items()}

    def _read(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for role, process in self._processes:
            times = process.cpu_times()
            total[role] = total.get(role, 0.0) + times.user + times.system
        return total


def role_of(process: psutil.Process) -> str:
    words = " ".join([process.name(), *process.cmdline(), ""])
    return next((role for mark, role in ROLES.items() if mark in words), "others")


def load_command(url: str, connections: int, seconds: float) -> list[str]:
    if wrk := shutil.which("wrk"):
        return [wrk, "-t1", f"-c{connections}", f"-d{seconds:g}s", "-s", str(HERE / "invoke.lua"), "--latency", url]
    return [sys.executable, "-m", "benchmarks.invoke_load", url, str(connections), str(seconds)]


def load(url: str, connections: int, seconds: float) -> dict[str, Any]:
    """What the load generator says about itself, and the CPU seconds that it took."""
    before = os.times()
    done = subprocess.run(load_command(url, connections, seconds), stdout=subprocess.PIPE, check=True)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return {**json.loads(done.stdout.splitlines()[-1]), "cpu_s": spent}


def measure(name: str, python: Path, connections: int, seconds: float) -> dict[str, Any]:
    with stoker_stack(python) if name == "stoker" else peer_stack(name, python) as target:
        wait_for(target.url)
        load(target.url, connections, WARM_UP_S)
        usage = Usage(target.root)
        told = load(target.url, connections, seconds)
        spent = {**usage.spent(), "load": told.pop("cpu_s")}
        valid = not told["failed"] and answers(target.url)
    cpu_us = {role: 1e6 * used / max(1, told["requests"]) for role, used in spent.items()}
    return {
        "valid": valid,
        "per_s": told["requests"] / told["seconds"],
        "cores": sum(spent.values()) / told["seconds"],
        "cpu_us_total": sum(cpu_us.values()),
        **told,
        "cpu_us": cpu_us,
        "load_average": os.getloadavg()[0],
    }


def measure_all(names: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Round by round through all, so that a busy machine is busy for each."""
    rows: dict[str, list[dict[str, Any]]] = {}
    failures: dict[str, Any] = {}
    for _ in range(options.rounds):
        for name in [name for name in names if name not in failures]:
            try:
                python = peer_python(f"invoke-{name}" if REQUIREMENTS[name] else name, REQUIREMENTS[name])
                rows.setdefault(name, []).append(measure(name, python, options.connections, options.seconds))
            except PeerFailed as failure:
                failures[name] = {"failed": str(failure)}
    return {name: failures.get(name) or summary(rows[name]) for name in names}


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The round with the median rate; one invalid round makes the row invalid."""
    middle = statistics.median_low([row["per_s"] for row in rounds])
    chosen = next(row for row in rounds if row["per_s"] == middle)
    return {**chosen, "valid": all(row["valid"] for row in rounds), "rounds": rounds}


def table_row(name: str, result: dict[str, Any]) -> list[Any]:
    if "failed" in result and "per_s" not in result:
        return [name, f"failed: {result['failed']}", *[""] * 10]
    numbers = [f"{result[key]:.0f}" for key in ("per_s",)] + [f"{result[key]:.1f}" for key in ("p50_ms", "p99_ms")]
    cpu = [
        f"{result['cpu_us'].get(role, 0):.0f}" for role in ("gateway", "server", "agent", "function", "others", "load")
    ]
    label = name if result["valid"] else f"{name} INVALID"
    return [label, *numbers, f"{result['cores']:.2f}", f"{result['cpu_us_total']:.0f}", *cpu]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--cores", type=int, default=2, help="on which everything runs; 0: all")
    parser.add_argument("--only", nargs="+", choices=list(REQUIREMENTS), default=list(REQUIREMENTS))
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    if options.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    results = measure_all(options.only, options)
    generator = "wrk" if shutil.which("wrk") else "benchmarks.invoke_load"
    header = ("system", "calls/s", "p50 ms", "p99 ms", "cores", "CPU µs", *CPU_COLUMNS)
    print_table(
        f"no-op calls, {options.connections} connections, load by {generator}",
        header,
        [table_row(name, row) for name, row in results.items()],
    )
    arguments = {name: value for name, value in vars(options).items() if name != "json"}
    record = {"systems": results, "versions": REQUIREMENTS, "load_generator": generator}
    print("written to", save("invoke", arguments, record, options.json))


if __name__ == "__main__":
    main()
