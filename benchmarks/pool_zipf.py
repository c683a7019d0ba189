"""Many small models on one device behind one endpoint, asked for by Zipf's law: are all requests answered, and what
does the most wanted model lose to the others? A whole `stoker up`, over HTTP, streamed. The same arrivals of the most
wanted model are sent alone, and with the others'. Run: python -m benchmarks.pool_zipf --models 50
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from benchmarks.models import published
from benchmarks.report import print_table, save, spread
from stoker.runtime.local import LocalStack

DATA = Path(".stoker")
PROMPT_TOKENS, TOKENS, EXPONENT = 64, 32, 1.0
APP = """
import stoker

app = stoker.App("zipf")
for number in range({models}):
    app.llm(f"model-{{number}}", weights={weights!r}, idle_timeout=600, max_model_len=2048, max_seqs=16)
"""

Arrival = tuple[float, int]
Found = tuple[int, float, float, int]
"""Of a request: its model, seconds to the first token and to the end, and how many pieces came."""


def arrivals(models: int, rate: float, seconds: float) -> list[Arrival]:
    """(when, which model), with exponential gaps."""
    order, at = random.Random(5), 0.0
    weights = [1 / (rank + 1) ** EXPONENT for rank in range(models)]
    found: list[Arrival] = []
    while (at := at + order.expovariate(rate)) < seconds:
        found.append((at, order.choices(range(models), weights)[0]))
    return found


async def ask(client: httpx.AsyncClient, model: int, number: int) -> Found:
    prompt = " ".join(f"w{(number * 7 + place * 13) % 500}" for place in range(PROMPT_TOKENS))
    body = {"model": f"model-{model}", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    began, first, pieces = time.perf_counter(), 0.0, 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first, pieces = first or time.perf_counter() - began, pieces + 1
    return model, first, time.perf_counter() - began, pieces


async def send(url: str, schedule: list[Arrival]) -> list[Found]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        began = time.perf_counter()

        async def later(number: int, at: float, model: int) -> Found:
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            return await ask(client, model, number)

        return await asyncio.gather(*(later(number, *arrival) for number, arrival in enumerate(schedule)))


def latencies(found: list[Found]) -> dict[str, Any]:
    return {"requests": len(found), "first_s": spread([f for _, f, _, _ in found]),
            "whole_s": spread([w for _, _, w, _ in found])}  # fmt: skip


def measure(stack: LocalStack, options: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    asyncio.run(send(stack.url, [(number * options.stagger, number) for number in range(options.models)]))
    waking = time.perf_counter() - began
    # Each model's graphs are captured one by one while nobody asks for anything.
    time.sleep(options.settle)
    schedule = arrivals(options.models, options.rate, options.seconds)
    hottest = [(at, model) for at, model in schedule if model == 0]
    asyncio.run(send(stack.url, hottest[: len(hottest) // 4 or 1]))
    alone = asyncio.run(send(stack.url, hottest))
    mixed = asyncio.run(send(stack.url, schedule))
    own = [each for each in mixed if each[0] == 0]
    before, after = latencies(alone), latencies(own)
    ratios = {f"{kind} p99 ratio": after[kind]["p99"] / before[kind]["p99"] for kind in ("first_s", "whole_s")}
    return {"waking_all_s": waking, "alone": before, "among_others": after, **ratios, "all": latencies(mixed),
            "models_asked": len(Counter(model for _, model in schedule)),
            "unanswered": sum(not pieces for *_, pieces in mixed)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--models", type=int, default=50)
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second to all of them")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--stagger", type=float, default=0.0, help="seconds between the first requests that wake them")
    parser.add_argument("--settle", type=float, default=60.0, help="seconds of rest after all are awake")
    parser.add_argument("--device-memory-gb", type=float, default=0.0)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    weights = published(options.model, DATA.resolve())
    environment = {"STOKER_DEVICE_MEMORY_GB": str(options.device_memory_gb)}
    with tempfile.TemporaryDirectory() as folder:
        app = Path(folder) / "zipf.py"
        app.write_text(APP.format(models=options.models, weights=weights))
        with LocalStack(Path(folder) / "data", env=environment) as stack:
            stack.deploy(app)
            results = measure(stack, options)
    rows = [(name, "") if isinstance(value, dict) else (name, value) for name, value in results.items()]
    for name in ("alone", "among_others", "all"):
        rows += [(f"{name} {kind} {share}", value) for kind in ("first_s", "whole_s")
                 for share, value in results[name][kind].items()]  # fmt: skip
    print_table(f"zipf: {options.models} x {options.model}", ("what", "value"), rows)
    arguments = {name: value for name, value in vars(options).items() if name != "json"}
    print(save("pool-zipf", arguments, results, options.json))


if __name__ == "__main__":
    main()
