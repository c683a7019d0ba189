"""The engine called directly, with the arrivals that `benchmarks.serve` then sends over HTTP: what is missing there is
what gateway, queue and agent add. In a process of its own, which gives the GPU back at its end.

    python -m benchmarks.direct < plan.json > results.json

The plan: {"model": ..., "calibrate": [N, ...], "prompt": tokens, "output": tokens}. For each N: how many requests a
second are answered when N are always under way, and then the times to the first token and between tokens when requests
arrive at random at LOAD times that rate. First of all one request at a time.
"""

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.load import Record

LOAD = 0.9
CALIBRATION_S = 3.0
ARRIVALS_S = 10.0
ALONE = 6


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Poisson arrivals: seconds after the start."""
    rng = random.Random(seed)
    times: list[float] = []
    now = rng.expovariate(rate)
    while now < seconds:
        times.append(now)
        now += rng.expovariate(rate)
    return times


def prompts(tokens: int, seed: int) -> Iterator[list[int]]:
    """Of random ids below 500, which are a word each for the model's tokenizer."""
    rng = random.Random(seed)
    while True:
        yield [rng.randrange(500) for _ in range(tokens)]


def measured(plan: dict[str, Any]) -> dict[str, Any]:
    """Runs a plan in another process."""
    command = [sys.executable, "-m", "benchmarks.direct"]
    done = subprocess.run(command, input=json.dumps(plan).encode(), stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def summary(records: Sequence[Record]) -> dict[str, float]:
    ttft = [record.ttft for record in records]
    cuts = statistics.quantiles(ttft, n=100) if len(ttft) > 1 else ttft * 99
    return {
        "requests": len(records),
        "ttft_p50_ms": cuts[49] * 1e3,
        "ttft_p99_ms": cuts[98] * 1e3,
        "itl_p50_ms": statistics.median(record.itl for record in records) * 1e3,
        "output_tokens_per_s": sum(record.completion_tokens for record in records)
        / (max(record.last for record in records) - min(record.due for record in records)),
        "mean_open": sum(record.last - record.due for record in records)
        / (max(record.last for record in records) - min(record.due for record in records)),
    }


def drive(engine: Any, times: Sequence[float], most_open: int, prompt: int, output: int, seed: int) -> list[Record]:
    """Requests submitted at `times`, at most `most_open` at once."""
    from benchmarks.engine import request

    source = prompts(prompt, seed)
    records = [Record(due=due) for due in times]
    coming, begun = 0, 0
    origin = time.perf_counter()
    while coming < len(records) or engine.has_work():
        now = time.perf_counter() - origin
        while coming < len(records) and times[coming] <= now and coming - begun < most_open:
            records[coming].sent = now
            engine.submit(request(coming, next(source), output))
            coming += 1
        for delta in engine.step() if engine.has_work() else ():
            record = records[int(delta.request_id)]
            record.last = time.perf_counter() - origin
            record.first = record.first or record.last
            record.completion_tokens += len(delta.tokens)
            begun += delta.finish_reason is not None
    return records


def rate_of(engine: Any, always_open: int, prompt: int, output: int) -> float:
    """Requests per second with so many under way."""
    drive(engine, [0.0] * always_open, always_open, prompt, output, seed=1)
    start = time.perf_counter()
    count = 0
    while time.perf_counter() - start < CALIBRATION_S:
        drive(engine, [0.0] * 3 * always_open, always_open, prompt, output, seed=2 + count)
        count += 3 * always_open
    return count / (time.perf_counter() - start)


def main() -> None:
    from benchmarks.engine import random_engine

    plan = json.load(sys.stdin)
    prompt, output = plan["prompt"], plan["output"]
    # 0: what a deployed model has.
    engine = random_engine(plan["model"], token_budget=0)
    engine.runner.warm_up()
    drive(engine, [0.0] * 4, 4, prompt, 4, seed=0)
    while engine.prepare_idle():
        pass
    alone = [drive(engine, [0.0], 1, prompt, output, seed=10 + run)[0] for run in range(ALONE)]
    results: dict[str, Any] = {"alone": summary(alone[1:]), "arrivals": []}
    for most_open in plan["calibrate"]:
        rate = LOAD * rate_of(engine, most_open, prompt, output)
        times = arrivals(rate, ARRIVALS_S, seed=most_open)
        found = summary(drive(engine, times, 256, prompt, output, seed=100 + most_open))
        results["arrivals"].append({"concurrency": most_open, "rate": rate, **found})
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
