"""The first token after waking, with the system prompt kept in the object store and without.

Two requests with one system prompt are answered, the function falls asleep, and the next request with that prompt
wakes it; again and again, with 256 MiB of kept prompts and with none. Weights are in the page cache both times.

Run: python -m benchmarks.prompt_cache [--model smollm2-135m] [--tokens 1024] [--runs 3]
"""

import argparse
import os
import random
from pathlib import Path
from typing import Any

from benchmarks.coldstart import DATA, first_token
from benchmarks.first_token import await_workers, fall_asleep
from benchmarks.models import SHAPES, published
from benchmarks.report import print_table, save, spread
from stoker.runtime.local import LocalStack

APP = Path(__file__).with_name("app.py")
QUESTION_TOKENS = 16
CASES = {"kept": "256", "not kept": "0"}


def words(count: int, vocabulary: int, seed: int) -> str:
    """One token each, in the models of benchmarks/models.py."""
    chosen = random.Random(seed)
    return " ".join(f"w{chosen.randrange(10, vocabulary)}" for _ in range(count))


def ask(stack: LocalStack, system: str, vocabulary: int, seed: int) -> dict[str, Any]:
    seconds, job_id = first_token(stack.url, f"{system} {words(QUESTION_TOKENS, vocabulary, seed)}")
    with stack.client() as client:
        job = client.job(job_id)
    await_workers(stack, awake=True)
    timeline = {phase["name"]: phase for phase in job["timeline"]}
    fetched, restored = (timeline.get(f"{part} prompts", {"seconds": 0.0, "bytes": 0}) for part in ("fetch", "restore"))
    return {
        "seconds": seconds,
        "cached_tokens": job["usage"]["cached_tokens"],
        "fetch_s": fetched["seconds"],
        "restore_s": restored["seconds"],
        "bytes": fetched["bytes"],
    }


def run_case(case: str, weights: str, vocabulary: int, tokens: int, runs: int) -> list[dict[str, Any]]:
    os.environ |= {"BENCH_WEIGHTS": weights, "BENCH_IDLE": "2", "BENCH_MAX_LEN": str(tokens + 64)}
    os.environ |= {"STOKER_PARK_S": "0", "STOKER_PROMPT_CACHE_MB": CASES[case]}
    system, results = words(tokens, vocabulary, 0), []
    with LocalStack(DATA.resolve() / "bench-prompts") as stack:
        stack.deploy(APP)
        for seed in (1, 2):
            ask(stack, system, vocabulary, seed)
        for run in range(runs):
            fall_asleep(stack)
            results.append({"case": case, "run": run, **ask(stack, system, vocabulary, 10 + run)})
            print(f"  {case} {run}: {results[-1]}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", choices=sorted(SHAPES))
    parser.add_argument("--tokens", type=int, default=1024, help="of the system prompt")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    weights, vocabulary = published(options.model, DATA.resolve()), SHAPES[options.model]["vocab_size"]
    results = [row for case in CASES for row in run_case(case, weights, vocabulary, options.tokens, options.runs)]
    rows = []
    for case in CASES:
        own = [result for result in results if result["case"] == case]
        seconds = [result["seconds"] for result in own]
        cached = own[-1]["cached_tokens"]
        rows.append((case, min(seconds), spread(seconds)["p50"], max(seconds), cached, own[-1]["bytes"] / 1e6))
    header = ("prompts", "min s", "p50 s", "max s", "cached tokens", "MB")
    print_table(f"first token after waking, {options.model}, system prompt of {options.tokens} tokens", header, rows)
    arguments = {"model": options.model, "tokens": options.tokens, "runs": options.runs}
    print("written to", save("prompt_cache", arguments, results, options.json))


if __name__ == "__main__":
    main()
