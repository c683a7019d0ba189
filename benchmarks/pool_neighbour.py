"""A calm tenant beside one that floods, with a real gateway, queue, agent and engine process: its latency alone and
beside the flood, in turns, and in which part of its requests' way the difference lies.

Run: python -m benchmarks.pool_neighbour --model tiny --rounds 6 --seconds 10
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from benchmarks.background import Background
from benchmarks.models import published
from benchmarks.report import print_table, save, spread
from stoker.runtime.local import LocalStack
from stoker.runtime.secret import kept_secret
from stoker.runtime.tenancy.api_key import Keyring

DATA = Path(".stoker")
PARTS = ("before", "queue", "first_token", "tokens", "after")
WAITING = 64
CALM, NOISY = (50, 20), (100, 60)
"""Tokens of a request's prompt and answer."""


def login(root: httpx.Client, url: str, name: str) -> httpx.Client:
    root.put(f"/v1/tenants/{name}", json={}).raise_for_status()
    made = root.post(f"/v1/tenants/{name}/keys", json={"scopes": ["invoke"]}).raise_for_status()
    return client(url, made.json()["key"])


def client(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=120)


def prompt(number: int, tokens: int) -> list[int]:
    return [1 + (7 * i + 41 * number) % 500 for i in range(tokens)]


class Flood(Background):
    """A tenant that always has `WAITING` jobs or more, in a thread of its own."""

    def __init__(self, client: httpx.Client) -> None:
        super().__init__()
        self._client = client

    def _run(self) -> None:
        jobs: list[str] = []
        number = 0
        while not self._stop.is_set():
            queued = self._client.get("/v1/functions/crowded").raise_for_status().json()["queued"]
            for _ in range(WAITING - queued):
                number += 1
                words = " ".join(f"w{token}" for token in prompt(number, NOISY[0]))
                body = {"messages": [{"role": "user", "content": words}], "max_tokens": NOISY[1]}
                made = self._client.post("/v1/functions/crowded/jobs", json=body).raise_for_status()
                jobs.append(made.json()["id"])
            self._stop.wait(0.2)
        for job in jobs:
            self._client.delete(f"/v1/jobs/{job}")


def ask(calm: httpx.Client, number: int) -> dict[str, float]:
    """Milliseconds of one request: in all, and of each part of its way."""
    words = " ".join(f"w{token}" for token in prompt(number, CALM[0]))
    body = {"messages": [{"role": "user", "content": words}], "max_tokens": CALM[1]}
    began = time.time()
    answer = calm.post("/v1/functions/crowded", json=body).raise_for_status()
    ended = time.time()
    job = calm.get(f"/v1/jobs/{answer.headers['x-job-id']}").raise_for_status().json()
    return {"all": (ended - began) * 1e3, **parts(job, began, ended)}


def for_a_while(calm: httpx.Client, numbers: Callable[[], int], seconds: float) -> list[dict[str, float]]:
    found: list[dict[str, float]] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found.append(ask(calm, numbers()))
        time.sleep(found[-1]["all"] / 1e3)
    return found


def parts(job: dict[str, Any], began: float, ended: float) -> dict[str, float]:
    """What lies between the moments that the job's record knows; the gateway's at both ends."""
    phases = {phase["name"]: (phase["start_s"], phase["start_s"] + phase["seconds"]) for phase in job["timeline"]}
    begun, done = phases["run"]
    started = job["started_at"] - begun
    marks = [began, job["enqueued_at"], *(started + at for at in (begun, phases["first token"][1], done)), ended]
    return {name: (marks[i + 1] - marks[i]) * 1e3 for i, name in enumerate(PARTS)}


def measure(options: argparse.Namespace, url: str, key: str) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {"alone": [], "beside": []}
    with ExitStack() as clients:
        root = clients.enter_context(client(url, key))
        spec = {
            "kind": "llm",
            "weights": published(options.model, DATA.resolve()),
            "model": {"max_seqs": options.max_seqs},
            "scaling": {"max_replicas": 1, "idle_timeout_s": 600},
            "limits": {"max_running_per_tenant": options.most},
        }
        root.put("/v1/functions/crowded", json={"spec": spec}).raise_for_status()
        calm, noisy = (clients.enter_context(login(root, url, name)) for name in ("calm", "noisy"))
        numbers = iter(range(1, 10**9)).__next__
        for_a_while(calm, numbers, options.seconds)
        for _ in range(options.rounds):
            found["alone"] += for_a_while(calm, numbers, options.seconds)
            with Flood(noisy):
                for_a_while(calm, numbers, options.seconds / 3)
                found["beside"] += for_a_while(calm, numbers, options.seconds)
    return described(found["alone"], found["beside"])


def described(alone: Sequence[dict[str, float]], beside: Sequence[dict[str, float]]) -> dict[str, Any]:
    described: dict[str, Any] = {"requests alone": len(alone), "requests beside": len(beside)}
    for part in ("all", *PARTS):
        with_, without = (spread([each[part] for each in found]) for found in (beside, alone))
        for share in ("p50", "p99"):
            described[f"{part} {share} ms"] = f"{without[share]:.1f} -> {with_[share]:.1f}"
            if part == "all":
                described[f"ratio {share}"] = with_[share] / without[share]
    return described


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--max-seqs", type=int, default=16)
    parser.add_argument(
        "--most", type=int, default=0, help="jobs of one tenant that run at once; 0: as many as there is room for"
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each half of a round")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, LocalStack(Path(folder), env={"STOKER_AUTH": "keys"}) as stack:
        results = measure(options, stack.url, Keyring(kept_secret(Path(folder))).root_text())
    print_table(f"beside a flood: {options.model}", ("what", "value"), list(results.items()))
    arguments = {name: value for name, value in vars(options).items() if name != "json"}
    print(save("pool-neighbour", arguments, results, options.json))


if __name__ == "__main__":
    main()
