"""Many models on one device.

`swap`: three models that don't fit together, in random order: from a request for one that isn't there to its first
token, the copies' rate beside the measured one, the tokens beside those of each model alone, memory over the swaps.
`ledger`: tenants, models and aborts at random; where the device's time went, and whether all of it is accounted for.
`noisy`: a tenant that asks for little beside one that asks for more than the device can do.
`zipf` is in benchmarks.pool_zipf. Run: python -m benchmarks.pool swap --model llama3-8b --device-memory-gb 40
"""

import argparse
import random
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch

from benchmarks.background import Background
from benchmarks.coldstart_memory import device_bytes, host_bytes
from benchmarks.models import published
from benchmarks.pool_device import Device, Reply
from benchmarks.report import print_table, save, spread

DATA = Path(".stoker")
NAMES = ("one", "two", "three")
OPTIONS = {"max_model_len": 1024, "max_seqs": 16, "prefix_cache": False}
PROMPTS, PROMPT_TOKENS, TOKENS = 6, 64, 8
COPY_BYTES = 64 << 20


def folder_of(model: str) -> Path:
    return Path(urlparse(published(model, DATA.resolve())).path)


def prompts(vocabulary: int) -> list[list[int]]:
    order = random.Random(0)
    return [[order.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]


def load_all(device: Device, folder: Path) -> None:
    for number, name in enumerate(NAMES):
        device.load(name, folder, variant=number, **OPTIONS)


def alone(folder: Path, asked: list[list[int]], limit: int) -> dict[tuple[str, int], list[int]]:
    """The tokens of each model when it is the only one."""
    found = {}
    for number, name in enumerate(NAMES):
        with Device(limit) as device:
            device.load(name, folder, variant=number, **OPTIONS)
            for index, prompt in enumerate(asked):
                found[name, index] = device.ask(name, prompt, TOKENS).wait().tokens
    return found


def pinned_bytes_s() -> float:
    """Of copies like those of a swap, nothing else going on; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0.0
    host = torch.empty(16 * COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device="cuda")
    took = []
    for _ in range(8):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for start in range(0, host.numel(), COPY_BYTES):
            target[start : start + COPY_BYTES].copy_(host[start : start + COPY_BYTES], non_blocking=True)
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    del target
    torch.cuda.empty_cache()
    return host.numel() / sorted(took)[len(took) // 2]


def swap(options: argparse.Namespace) -> dict[str, Any]:
    folder = folder_of(options.model)
    asked = prompts(500)
    limit = int(options.device_memory_gb * 1e9)
    fastest, wanted = pinned_bytes_s(), alone(folder, asked, limit)
    with Device(limit) as device:
        load_all(device, folder)
        order, until = random.Random(1), time.monotonic() + options.seconds
        there, away, wrong, sizes = [], [], 0, []
        while len(away) < options.swaps and time.monotonic() < until:
            name, index = order.choice(NAMES), order.randrange(len(asked))
            was_there = name in device.stats()["there"]
            reply = device.ask(name, asked[index], TOKENS).wait()
            (there if was_there else away).append(reply.first - reply.asked)
            wrong += reply.tokens != wanted[name, index]
            sizes.append((host_bytes(), device_bytes()))
        stats = device.stats()
    distinct = len({tuple(wanted[name, 0]) for name in NAMES})
    return {**described(stats, fastest), **drift(sizes), "first_token_away_s": spread(away) | {"max": max(away)},
            "first_token_there_s": spread(there), "requests": len(there) + len(away), "swaps": len(away),
            "wrong_answers": wrong, "models_with_tokens_of_their_own": distinct, "time": stats["time"]}  # fmt: skip


def described(stats: dict[str, Any], fastest: float) -> dict[str, float]:
    swaps = stats["swaps"]
    rate = swaps["bytes"] / max(swaps["us"], 1) * 1e6
    share = {"share_of_pinned": rate / fastest} if fastest else {}
    return {
        "swap_gb_s": rate / 1e9,
        "pinned_gb_s": fastest / 1e9,
        "model_gb": swaps["bytes"] / swaps["count"] / 1e9,
    } | share


def drift(sizes: list[tuple[int, int]]) -> dict[str, int]:
    """From a tenth of the way on, when everything was there once, to the end."""
    (host, device), (last_host, last_device) = sizes[len(sizes) // 10], sizes[-1]
    return {"host_drift_bytes": last_host - host, "device_drift_bytes": last_device - device}


def ledger(options: argparse.Namespace) -> dict[str, Any]:
    folder, order = folder_of(options.model), random.Random(3)
    with Device(int(options.device_memory_gb * 1e9)) as device:
        load_all(device, folder)
        before, replies = device.stats()["time"], []
        until = time.monotonic() + options.seconds
        while time.monotonic() < until:
            tenant = order.choice(("ann", "ann", "ann", "bob", "eve"))
            prompt = [order.randrange(500) for _ in range(order.randrange(1, 400))]
            replies.append((tenant, device.ask(order.choice(NAMES), prompt, order.randrange(1, 100), tenant)))
            if order.random() < 0.1:
                device.abort(replies[-1][1])
            time.sleep(order.expovariate(options.rate))
        for _, reply in replies:
            reply.wait()
        after = device.stats()["time"]
    return balance({kind: after[kind] - before[kind] for kind in after}, replies)


def noisy(options: argparse.Namespace) -> dict[str, Any]:
    """A quiet tenant's requests, one after the other with pauses as long, alone and beside one that has many."""
    folder, found = folder_of(options.model), {}
    wide = {**OPTIONS, "max_seqs": 32}
    with Device() as device:
        for number, name in enumerate(NAMES[:2]):
            device.load(name, folder, variant=number, **wide)
        quiet_latencies(device, options.seconds / 8)
        alone = quiet_latencies(device, options.seconds / 4)
        found["alone"] = described_latencies(alone)
        for beside in NAMES[:2]:
            with Flood(device, beside):
                quiet_latencies(device, options.seconds / 8)
                mixed = quiet_latencies(device, options.seconds / 4)
            found[f"beside_a_flood_of_{'the same' if beside == NAMES[0] else 'another'}_model"] = {
                **described_latencies(mixed),
                **{f"{share} ratio": spread(mixed)[share] / spread(alone)[share] for share in ("p50", "p99")},
            }
    return found


def described_latencies(latencies: list[float]) -> dict[str, float]:
    return {"requests": len(latencies), **spread(latencies)}


def quiet_latencies(device: Device, seconds: float) -> list[float]:
    order, found = random.Random(7), []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        prompt = [order.randrange(500) for _ in range(50)]
        reply = device.ask(NAMES[0], prompt, 20, "quiet").wait()
        found.append(reply.ended - reply.asked)
        time.sleep(found[-1])
    return found


class Flood(Background):
    """A tenant that always has `LEAST` requests or more, in a thread of its own."""

    LEAST = 24

    def __init__(self, device: Device, model: str) -> None:
        super().__init__()
        self._device, self._model = device, model

    def _run(self) -> None:
        order, replies = random.Random(9), []
        while not self._stop.wait(0.02):
            replies = [reply for reply in replies if not reply.over.is_set()]
            while len(replies) < self.LEAST:
                prompt = [order.randrange(500) for _ in range(100)]
                replies.append(self._device.ask(self._model, prompt, 60, "noisy"))
        for reply in replies:
            self._device.abort(reply)
            reply.wait()


def balance(spent: dict[str, int], replies: list[tuple[str, Reply]]) -> dict[str, Any]:
    """What the requests were told they had, beside what the device says it did."""
    tenants: dict[str, dict[str, int]] = {}
    for tenant, reply in replies:
        sums = tenants.setdefault(tenant, {"requests": 0, "prefill_us": 0, "decode_us": 0, "swap_us": 0})
        sums["requests"] += 1
        for kind, value in zip(("prefill_us", "decode_us", "swap_us"), reply.charge, strict=True):
            sums[kind] += value
    charged = sum(sum(reply.charge) for _, reply in replies)
    nobodys = spent["wall"] - spent["busy"] - spent["swap"] - spent["load"] - spent["idle"]
    uncharged = spent["load"] + spent["idle"] + spent["wasted"] + (spent["swap"] - swap_of(tenants))
    return {"tenants": tenants, "device": spent, "charged_us": charged, "uncharged_us": uncharged,
            "error_share": (charged + uncharged - spent["wall"]) / spent["wall"], "nobodys_us": nobodys}  # fmt: skip


def swap_of(tenants: dict[str, dict[str, int]]) -> int:
    return sum(sums["swap_us"] for sums in tenants.values())


def flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in values.items():
        rows += flat(value, f"{prefix}{name} ") if isinstance(value, dict) else [(prefix + name, value)]
    return rows


CASES = {"swap": swap, "ledger": ledger, "noisy": noisy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=tuple(CASES))
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--device-memory-gb", type=float, default=40.0)
    parser.add_argument("--swaps", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=600.0, help="at most so long, after the models are loaded")
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second of `ledger`")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    results = CASES[options.case](options)
    print_table(f"{options.case}: {options.model}", ("what", "value"), flat(results))
    arguments = {name: value for name, value in vars(options).items() if name != "json"}
    print(save(f"pool-{options.case}", arguments, results, options.json))


if __name__ == "__main__":
    main()
