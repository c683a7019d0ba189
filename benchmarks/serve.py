"""Streamed chat requests through the HTTP gateway: TTFT, ITL and tokens per second.

    python -m benchmarks.serve [--model smollm2] [closed] [burst] [arrivals]

closed: N clients, each sends its next request when the last one has ended (--concurrency, --requests, --words,
--max-tokens). burst: the 256 requests of workload A, all open at once. arrivals: 512 tokens in, 128 out, one request at
a time and then arriving at random, at 0.9 times the rate that the engine called directly keeps up with when 32 and 64
are always under way; beside the same arrivals at that engine (a model of `benchmarks.engine` on a GPU).
"""

import argparse
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import direct
from benchmarks.load import Record, generate
from benchmarks.models import SHAPES, published
from benchmarks.report import print_table, save, spread
from stoker.runtime.local import LocalStack

DATA = Path(".stoker")
APP = Path(__file__).with_name("app.py")
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "life", "child", "world", "school", "family", "group")
MODES = ("closed", "burst", "arrivals")
CONCURRENCY = (32, 64)
MOST_OPEN = 256


def prompt_of(words: int, seed: int, synthetic: bool) -> str:
    generator = random.Random(seed)
    if synthetic:
        return " ".join(f"w{generator.randrange(500)}" for _ in range(words))
    return "Write a long story with these words: " + " ".join(generator.choice(WORDS) for _ in range(words))


def chat(prompt: str, max_tokens: int, at: float = 0.0, seed: int = 1) -> dict[str, Any]:
    """One entry of a load plan."""
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": max_tokens,
        "temperature": 0.6,
        "seed": seed,
    }
    return {"at": at, "body": body}


def summary(mode: str, concurrency: int, records: Sequence[Record]) -> dict[str, Any]:
    seconds = max(record.last for record in records) - min(record.due for record in records)
    produced = sum(record.completion_tokens for record in records)
    return {
        "mode": mode,
        "concurrency": concurrency,
        "requests": len(records),
        "seconds": seconds,
        "output_tokens_per_s": produced / seconds,
        "total_tokens_per_s": (produced + sum(record.prompt_tokens for record in records)) / seconds,
        "mean_open": sum(record.last - record.due for record in records) / seconds,
        "ttft_ms": {k: v * 1000 for k, v in spread([record.ttft for record in records]).items()},
        "itl_ms": {k: v * 1000 for k, v in spread([record.itl for record in records]).items()},
    }


def closed(url: str, options: argparse.Namespace, synthetic: bool) -> list[dict[str, Any]]:
    results = []
    for n, concurrency in enumerate(options.concurrency):
        seeds = range(1000 * (n + 1), 1000 * (n + 1) + options.requests)
        plan = [chat(prompt_of(options.words, seed, synthetic), options.max_tokens) for seed in seeds]
        results.append(summary("closed", concurrency, sent_later(generate(url, plan, concurrency))))
    return results


def sent_later(records: Sequence[Record]) -> Sequence[Record]:
    """A client of a closed loop wants nothing before its last request has ended."""
    for record in records:
        record.due = record.sent
    return records


def burst(url: str) -> list[dict[str, Any]]:
    rng = random.Random(0)
    plan = [
        chat(" ".join(f"w{rng.randrange(10_000)}" for _ in range(prompt)), output, seed=number)
        for number, (prompt, output) in enumerate(workload_a_lengths())
    ]
    return [summary("burst", len(plan), generate(url, plan, len(plan)))]


def workload_a_lengths(count: int = 256, low: int = 100, high: int = 1024) -> list[tuple[int, int]]:
    """Prompt and output lengths of `benchmarks.engine.workload_a`, without its tokens."""
    rng = random.Random(0)
    prompts = [len([rng.randint(0, 10_000) for _ in range(rng.randint(low, high))]) for _ in range(count)]
    return [(prompt, rng.randint(low, high)) for prompt in prompts]


def arriving(url: str, beside: dict[str, Any]) -> list[dict[str, Any]]:
    """The arrivals of a `direct` measurement, over HTTP."""
    alone: list[Record] = []
    for run in range(direct.ALONE):
        alone += generate(url, [chat(prompt_of(512, 10 + run, True), 128)], 1)
    results = [{**summary("alone", 1, sent_later(alone[1:])), "direct": beside["alone"]}]
    for entry in beside["arrivals"]:
        times = direct.arrivals(entry["rate"], direct.ARRIVALS_S, seed=entry["concurrency"])
        plan = [chat(prompt_of(512, 5000 + n, True), 128, at) for n, at in enumerate(times)]
        found = summary("arrivals", entry["concurrency"], generate(url, plan, MOST_OPEN))
        results.append({**found, "rate": entry["rate"], "direct": entry})
    return results


def main() -> None:
    options = arguments()
    modes = options.modes or ["closed"]
    os.environ |= {"BENCH_WEIGHTS": published(options.model, DATA.resolve()), "BENCH_MAX_SEQS": "256"}
    synthetic = options.model in SHAPES
    results: list[dict[str, Any]] = []
    plan = {"model": options.model, "calibrate": CONCURRENCY, "prompt": 512, "output": 128}
    beside = direct.measured(plan) if "arrivals" in modes else {}
    with LocalStack(DATA.resolve() / "bench") as stack:
        stack.deploy(APP)
        for words in (8, 300):
            generate(stack.url, [chat(prompt_of(words, words, synthetic), 4)] * 2, 1)
        if "closed" in modes:
            results += closed(stack.url, options, synthetic)
        if "arrivals" in modes:
            results += arriving(stack.url, beside)
        if "burst" in modes:
            results += burst(stack.url)
    show(options.model, results)
    kept = {name: value for name, value in vars(options).items() if name != "json"}
    print("written to", save("serve", kept, results, options.json))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="*", choices=MODES, metavar="MODE", help=f"{', '.join(MODES)}; default: closed")
    parser.add_argument("--model", default="smollm2", help="smollm2, a shape of benchmarks/models.py, or a store URL")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--requests", type=int, default=16, help="requests at each concurrency")
    parser.add_argument("--words", type=int, default=64, help="words in each prompt")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


def show(model: str, results: Sequence[dict[str, Any]]) -> None:
    header = ("mode", "clients", "out tok/s", "TTFT p50", "p95", "p99 ms", "ITL p50", "p95", "p99 ms")
    header += ("direct: TTFT p50", "p99", "ITL p50")
    rows = [
        (
            r["mode"], r["concurrency"], r["output_tokens_per_s"], *r["ttft_ms"].values(), *r["itl_ms"].values(),
            *(r["direct"][name] for name in ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms") if "direct" in r),
        )
        for r in results
    ]  # fmt: skip
    print_table(f"chat over HTTP, {model}", header, [(*row, *[""] * (len(header) - len(row))) for row in rows])


if __name__ == "__main__":
    main()
