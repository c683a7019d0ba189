"""The engine by itself, without HTTP and queue: throughput, latency, decode steps, prefill and a shared prefix, on
random weights made on the device, beside what vLLM 0.22 does with the same requests on the same kind of GPU.

    python -m benchmarks.engine [--model llama3-8b|smollm2-135m] [--batch-invariant] [--json FILE]

Requests ignore the end token and are sampled at temperature 0.6. vLLM's figures are medians for one H200; host-bound
ones (all of the 135M model's) vary by a factor of 1.5 between machines.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

import torch

from benchmarks.models import BASE, SHAPES
from benchmarks.report import percentile, print_table, save
from stoker.runtime.engine.config import ModelConfig
from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.options import EngineOptions
from stoker.runtime.engine.request import GenerationRequest, SamplingParams
from stoker.runtime.engine.weights import plan

MODELS = ("llama3-8b", "smollm2-135m")
TEMPERATURE = 0.6
HIGHEST_TOKEN = 10_000
# Of workload A's tokens, and whether the prompt cache is on: none of these runs hits it.
RUNS = ((17, True), (31, False))
# The token budget is that of vLLM's offline class, which made its figures.
MAX_SEQS, MAX_MODEL_LEN, TOKEN_BUDGET = 256, 4096, 16_384

Requests = list[GenerationRequest]


@dataclass
class Row:
    """One line of the table. `vllm` and `target` are in the same unit; None: not measured, not set."""

    what: str
    value: float
    unit: str
    vllm: float | None = None
    target: str = ""


BASELINES: dict[str, dict[str, float]] = {
    "llama3-8b": {
        "workload A": 9431, "batch 1: TTFT": 15.6, "batch 1: per token": 5.01, "decode 64": 7.73, "decode 256": 18.04,
        "prefill": 41_900, "shared prefix, cold": 1.26, "shared prefix, warm": 1.24,
        "shared prefix, cold: mean TTFT": 0.196, "shared prefix, warm: mean TTFT": 0.18,
    },
    "smollm2-135m": {
        "workload A": 27_380, "batch 1: TTFT": 9.9, "batch 1: per token": 1.5, "decode 64": 3.2, "decode 256": 6.5,
        "prefill": 702_000,
    },
}  # fmt: skip
TARGETS: dict[str, dict[str, str]] = {
    "llama3-8b": {
        "workload A": ">= 10400", "batch 1: per token": "<= 4.1", "decode 64": "<= 7.0",
        "decode 256": "<= 16.2", "prefill": ">= 42000", "shared prefix, cold": "<= 1.20",
        "shared prefix, warm": "<= 1.20", "shared prefix, warm: mean TTFT": "<= 0.17",
        "cost of the prompt cache without hits": "< 1",
    },
    "smollm2-135m": {"workload A": ">= 41070"},
}  # fmt: skip


@dataclass
class Burst:
    """Requests submitted at once. Each step: seconds since the submission, tokens that came, requests begun."""

    first: dict[str, float] = field(default_factory=dict)
    steps: list[tuple[float, int, int]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.steps[-1][0]

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens, _ in self.steps)

    @property
    def ttft(self) -> float:
        return statistics.mean(self.first.values())

    def decode_gaps(self, batch: int) -> list[float]:
        """Seconds between steps that each gave one token to every request."""
        return [
            after[0] - before[0]
            for before, after in itertools.pairwise(self.steps)
            if before[1] == after[1] == before[2] == batch
        ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description="Measure the engine on this GPU.")
    parser.add_argument("--model", choices=MODELS, default="llama3-8b")
    parser.add_argument("--batch-invariant", action="store_true", help="measure that mode, whose price this tells")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the results go")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.engine measures a GPU: no CUDA device was found, nothing was run.", file=sys.stderr)
        return 1
    engine, rows = started(arguments.model, arguments.batch_invariant)
    for measurement in (latency, decode, prefill, shared_prefixes, throughput):
        for row in measurement(engine):
            rows.append(beside(arguments.model, row))
            print(f"  {row.what}: {row.value:.4g} {row.unit}", flush=True)
    mode = ", batch-invariant" if arguments.batch_invariant else ""
    title = f"{arguments.model}{mode} on {torch.cuda.get_device_name()}, {engine.kv.num_blocks * 16} KV tokens"
    header = ("what", "stoker", "vLLM 0.22", "target", "unit")
    print_table(title, header, [(r.what, f"{r.value:.4g}", r.vllm or "", r.target, r.unit) for r in rows])
    stats = {**engine.stats(), "results": [asdict(row) for row in rows]}
    asked = {"model": arguments.model, "batch_invariant": arguments.batch_invariant}
    name = f"engine-{arguments.model}" + "-batch-invariant" * arguments.batch_invariant
    save(name, asked, stats, arguments.json)
    return 0


def started(model: str, batch_invariant: bool) -> tuple[Engine, list[Row]]:
    """An engine with every kernel loaded and every graph captured, and how long that took."""
    rows: list[Row] = []

    def timed(what: str, run: Callable[[], object]) -> None:
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        rows.append(Row(what, time.perf_counter() - start, "s"))
        print(f"  {what}: {rows[-1].value:.2f} s", flush=True)

    engine = random_engine(model, batch_invariant=batch_invariant)
    timed("warm-up", engine.runner.warm_up)
    engine.generate(fixed(4, 100, 4, seed=1))
    timed("graph capture", lambda: [None for _ in iter(engine.prepare_idle, False)])
    return engine, rows


def random_engine(
    model: str, token_budget: int = TOKEN_BUDGET, adapter_slots: int = 0, batch_invariant: bool = False
) -> Engine:
    """Normal * 0.02, norms 1, bfloat16."""
    config = ModelConfig.from_hf({**BASE, **SHAPES[model]})
    wanted = EngineOptions(
        device="cuda",
        max_seqs=MAX_SEQS,
        max_model_len=MAX_MODEL_LEN,
        token_budget=token_budget,
        adapter_slots=adapter_slots,
        batch_invariant=batch_invariant,
    ).resolve(config)
    weights = plan(config, wanted)
    torch.manual_seed(0)
    for target in weights.targets.values():
        if target.dim() == 1:
            target.fill_(1)
        else:
            target.normal_(0, 0.02)
    return Engine(config, wanted, weights, model)


def beside(model: str, row: Row) -> Row:
    row.vllm = BASELINES[model].get(row.what)
    row.target = TARGETS[model].get(row.what, "")
    return row


def latency(engine: Engine) -> list[Row]:
    """One request at a time, 512 tokens in, 256 out; the first run is not counted."""
    runs = [burst(engine, fixed(1, 512, 256, seed=612 + rep)) for rep in range(4)][1:]
    per_token = statistics.median((run.seconds - run.ttft) / (run.tokens - 1) for run in runs)
    ttft = statistics.median(run.ttft for run in runs)
    return [Row("batch 1: TTFT", ttft * 1e3, "ms"), Row("batch 1: per token", per_token * 1e3, "ms")]


def decode(engine: Engine) -> list[Row]:
    """Steps in which every request gets a token, contexts of 960 to 1120 tokens."""
    rows: list[Row] = []
    for batch in (8, 64, 256):
        gaps = burst(engine, fixed(batch, 960, 160, seed=3000 + batch)).decode_gaps(batch)
        rows.append(Row(f"decode {batch}", statistics.median(gaps) * 1e3, "ms/step"))
        rows.append(Row(f"decode {batch}: p90", percentile(gaps, 0.9) * 1e3, "ms/step"))
    return rows


def prefill(engine: Engine) -> list[Row]:
    seconds = [burst(engine, fixed(64, 2048, 1, seed=5000 + 2048 + 7 * rep)).seconds for rep in range(2)]
    return [Row("prefill", 64 * 2048 / statistics.median(seconds), "prompt tok/s")]


def shared_prefixes(engine: Engine) -> list[Row]:
    rows: list[Row] = []
    for suffixes, phase in enumerate(("cold", "warm")):
        run = burst(engine, shared_prefix(prefix_seed=0, suffix_seed=suffixes))
        rows.append(Row(f"shared prefix, {phase}", run.seconds, "s"))
        rows.append(Row(f"shared prefix, {phase}: mean TTFT", run.ttft, "s"))
    return rows


def throughput(engine: Engine) -> list[Row]:
    """256 requests at once, each repetition with other tokens, and once without looking for cached prefixes."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    for shift, cached in RUNS:
        engine.scheduler.prefix_cache = cached
        run = burst(engine, workload_a(shift))
        rates[cached].append(run.tokens / run.seconds)
    engine.scheduler.prefix_cache = True
    on, off = (statistics.median(rates[cached]) for cached in (True, False))
    return [
        Row("workload A", on, "output tok/s"),
        Row("workload A, prompt cache off", off, "output tok/s"),
        Row("cost of the prompt cache without hits", 100 * (1 - on / off), "%"),
    ]


def burst(engine: Engine, requests: Requests) -> Burst:
    result, start = Burst(), time.perf_counter()
    for request in requests:
        engine.submit(request)
    while engine.has_work():
        deltas = engine.step()
        now = time.perf_counter() - start
        for delta in deltas:
            if delta.finish_reason == "error":
                raise RuntimeError(delta.error)
            if delta.tokens:
                result.first.setdefault(delta.request_id, now)
        if produced := sum(len(delta.tokens) for delta in deltas):
            result.steps.append((now, produced, len(result.first)))
    return result


def workload_a(shift: int = 0, count: int = 256, low: int = 100, high: int = 1024) -> Requests:
    """Lengths uniform in [low, high], token ids uniform in [0, 10000] and moved by `shift`, so that a repetition hits
    no cached prefix. (The requests of nano-vllm's bench.py: 142,827 prompt and 133,966 output tokens.)"""
    rng = Random(0)
    size = HIGHEST_TOKEN + 1
    prompts = [
        [(rng.randint(0, HIGHEST_TOKEN) + shift) % size for _ in range(rng.randint(low, high))] for _ in range(count)
    ]
    return [request(i, prompt, rng.randint(low, high)) for i, prompt in enumerate(prompts)]


def fixed(count: int, prompt: int, output: int, seed: int) -> Requests:
    rng = Random(seed)
    return [request(i, [rng.randint(0, HIGHEST_TOKEN) for _ in range(prompt)], output) for i in range(count)]


def shared_prefix(prefix_seed: int, suffix_seed: int) -> Requests:
    """64 requests of 2048 shared and 64 own tokens, 128 out."""
    prefixes, suffixes = Random(10_000 + prefix_seed), Random(20_000 + suffix_seed)
    prefix = [prefixes.randint(0, HIGHEST_TOKEN) for _ in range(2048)]
    return [request(i, prefix + [suffixes.randint(0, HIGHEST_TOKEN) for _ in range(64)], 128) for i in range(64)]


def request(number: int, prompt: list[int], output: int) -> GenerationRequest:
    params = SamplingParams(output, temperature=TEMPERATURE, seed=number, ignore_eos=True)
    return GenerationRequest(str(number), prompt, params)


if __name__ == "__main__":
    sys.exit(main())
