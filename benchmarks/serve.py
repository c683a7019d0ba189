"""Concurrent streamed chat requests through the HTTP gateway: TTFT, ITL and tokens per second.

Closed loop: each of `--concurrency` clients sends its next request when the last one has ended.
Run: python -m benchmarks.serve [--model smollm2] [--concurrency 1 4 8] [--requests 16]
"""

import argparse
import asyncio
import json
import os
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.models import SHAPES, published
from benchmarks.report import print_table, save, spread
from stoker.runtime.local import LocalStack

DATA = Path(".stoker")
APP = Path(__file__).with_name("app.py")
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "life", "child", "world", "school", "family", "group")


@dataclass
class Measured:
    """One request: seconds to the first token, gaps between later ones, tokens as the server counts them."""

    ttft: float = 0.0
    total: float = 0.0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0


def prompt_of(words: int, seed: int, synthetic: bool) -> str:
    generator = random.Random(seed)
    if synthetic:
        return " ".join(f"w{generator.randrange(500)}" for _ in range(words))
    return "Write a long story with these words: " + " ".join(generator.choice(WORDS) for _ in range(words))


async def ask(client: httpx.AsyncClient, prompt: str, max_tokens: int) -> Measured:
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": max_tokens,
        "temperature": 0.6,
        "seed": 1,
    }
    measured = Measured()
    sent = last = time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.is_error:
            raise SystemExit((await response.aread()).decode())
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            chunk = json.loads(line[6:])
            if any(choice["delta"].get("content") for choice in chunk["choices"]):
                if measured.ttft:
                    measured.gaps.append(now - last)
                else:
                    measured.ttft = now - sent
                last = now
            if usage := chunk.get("usage"):
                measured.prompt_tokens = usage["prompt_tokens"]
                measured.completion_tokens = usage["completion_tokens"]
    measured.total = time.perf_counter() - sent
    return measured


async def load(url: str, concurrency: int, prompts: list[str], max_tokens: int) -> tuple[float, list[Measured]]:
    waiting = list(reversed(prompts))
    done: list[Measured] = []

    async def client_loop(client: httpx.AsyncClient) -> None:
        while waiting:
            done.append(await ask(client, waiting.pop(), max_tokens))

    limits = httpx.Limits(max_connections=concurrency + 8)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        started = time.perf_counter()
        await asyncio.gather(*(client_loop(client) for _ in range(concurrency)))
        return time.perf_counter() - started, done


def summary(concurrency: int, seconds: float, done: list[Measured]) -> dict[str, Any]:
    produced = sum(m.completion_tokens for m in done)
    return {
        "concurrency": concurrency,
        "requests": len(done),
        "seconds": seconds,
        "output_tokens_per_s": produced / seconds,
        "total_tokens_per_s": (produced + sum(m.prompt_tokens for m in done)) / seconds,
        "ttft_ms": {k: v * 1000 for k, v in spread([m.ttft for m in done]).items()},
        "itl_ms": {k: v * 1000 for k, v in spread([gap for m in done for gap in m.gaps]).items()},
        "samples": [asdict(m) | {"gaps": len(m.gaps)} for m in done],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, a shape of benchmarks/models.py, or a store URL")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--requests", type=int, default=16, help="requests at each concurrency")
    parser.add_argument("--words", type=int, default=64, help="words in each prompt")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    os.environ |= {"BENCH_WEIGHTS": published(options.model, DATA.resolve()), "BENCH_MAX_SEQS": "256"}
    synthetic = options.model in SHAPES
    results = []
    with LocalStack(DATA.resolve() / "bench") as stack:
        stack.deploy(APP)
        asyncio.run(load(stack.url, 1, [prompt_of(8, 0, synthetic)], 4))
        for n, concurrency in enumerate(options.concurrency):
            seeds = range(1000 * (n + 1), 1000 * (n + 1) + options.requests)
            prompts = [prompt_of(options.words, seed, synthetic) for seed in seeds]
            results.append(
                summary(concurrency, *asyncio.run(load(stack.url, concurrency, prompts, options.max_tokens)))
            )
    header = ("clients", "out tok/s", "TTFT p50", "p95", "p99 ms", "ITL p50", "p95", "p99 ms")
    rows = [
        (r["concurrency"], r["output_tokens_per_s"], *r["ttft_ms"].values(), *r["itl_ms"].values()) for r in results
    ]
    print_table(f"chat over HTTP, {options.model}", header, rows)
    arguments = {name: value for name, value in vars(options).items() if name != "json"}
    print("written to", save("serve", arguments, results, options.json))


if __name__ == "__main__":
    main()
