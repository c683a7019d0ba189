"""What LoRA adapters cost: decode steps and prefill of a model without room for them, with room that nobody uses, with
one adapter for all requests, and with eight in every batch; and how soon an adapter from a file on the host answers.

    python -m benchmarks.adapters [--model llama3-8b|smollm2-135m] [--json FILE]

Random weights and adapters of rank 16 on all seven projections.
"""

import argparse
import gc
import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.engine import MODELS, Requests, burst, fixed, random_engine
from benchmarks.models import BASE, SHAPES
from benchmarks.report import print_table, save
from stoker.runtime.adapters.adapter_file import AdapterFile
from stoker.runtime.adapters.peft import PARENT, AdapterConfig, Sizes
from stoker.runtime.engine.engine import Engine

SLOTS, RANK = 8, 16
BATCHES = (1, 8, 64, 256)


@dataclass
class Cost:
    """Milliseconds of a decode step by batch, and prompt tokens a second."""

    what: str
    decode_ms: dict[int, float]
    prefill_tokens_s: float


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapters", description="Measure adapters on this GPU.")
    parser.add_argument("--model", choices=MODELS, default="llama3-8b")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the results go")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.adapters measures a GPU: no CUDA device was found, nothing was run.", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        files = [random_adapter(arguments.model, Path(folder), number) for number in range(SLOTS + 1)]
        costs, load_ms = measured(arguments.model, files)
        size = Path(files[0].path).stat().st_size
    rows = [
        (cost.what, *(f"{cost.decode_ms[batch]:.2f}" for batch in BATCHES), f"{cost.prefill_tokens_s:.0f}")
        for cost in costs
    ]
    header = ("", *(f"decode {batch}, ms" for batch in BATCHES), "prefill tok/s")
    print_table(f"{arguments.model} on {torch.cuda.get_device_name()}", header, rows)
    print(f"first token with an adapter that isn't on the device, beyond one that is: {load_ms:.1f} ms")
    results = {"results": [asdict(cost) for cost in costs], "load_ms": load_ms, "adapter_bytes": size}
    save(f"adapters-{arguments.model}", {"model": arguments.model, "rank": RANK}, results, arguments.json)
    return 0


def random_adapter(model: str, folder: Path, seed: int) -> AdapterFile:
    sizes = Sizes.from_hf(SHAPES[model] | BASE)
    generator = torch.Generator("cuda").manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(sizes.layers):
        for module, parent in PARENT.items():
            depth, width = sizes.of(module)
            name = f"base_model.model.model.layers.{layer}.{parent}.{module}_proj.lora_"
            for half, shape in (("A", (RANK, depth)), ("B", (width, RANK))):
                values = torch.randn(shape, generator=generator, device="cuda") * 0.02
                tensors[f"{name}{half}.weight"] = values.bfloat16().cpu()
    path = folder / f"{seed}.safetensors"
    save_file(tensors, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return AdapterFile(digest, str(path), digest, AdapterConfig(RANK, 2.0))


def measured(model: str, files: Sequence[AdapterFile]) -> tuple[list[Cost], float]:
    costs = [cost("no room for adapters", ready(model, 0), [])]
    gc.collect()
    torch.cuda.empty_cache()
    engine = ready(model, SLOTS)
    engine.generate(with_adapters(fixed(SLOTS, 16, 2, seed=7), files[:SLOTS]))
    costs.append(cost("room, none used", engine, []))
    costs.append(cost("one adapter", engine, files[:1]))
    costs.append(cost(f"{SLOTS} adapters", engine, files[:SLOTS]))
    return costs, load_time(engine, files)


def ready(model: str, slots: int) -> Engine:
    """With every kernel loaded and every graph captured."""
    engine = random_engine(model, adapter_slots=slots)
    engine.runner.warm_up()
    engine.generate(fixed(4, 100, 4, seed=1))
    while engine.prepare_idle():
        pass
    return engine


def cost(what: str, engine: Engine, files: Sequence[AdapterFile]) -> Cost:
    decode_ms = {}
    for batch in BATCHES:
        run = burst(engine, with_adapters(fixed(batch, 960, 96, seed=3000 + batch), files))
        decode_ms[batch] = statistics.median(run.decode_gaps(batch)) * 1e3
    engine.scheduler.prefix_cache = False
    run = burst(engine, with_adapters(fixed(64, 2048, 1, seed=5000), files))
    engine.scheduler.prefix_cache = True
    found = Cost(what, decode_ms, 64 * 2048 / run.seconds)
    print(f"  {what}: {found.decode_ms}, prefill {found.prefill_tokens_s:.0f} tok/s", flush=True)
    return found


def with_adapters(requests: Requests, files: Sequence[AdapterFile]) -> Requests:
    """In turn."""
    return [replace(each, adapter=files[i % len(files)]) if files else each for i, each in enumerate(requests)]


def load_time(engine: Engine, files: Sequence[AdapterFile]) -> float:
    """Milliseconds; every request's adapter has just been pushed out by the one before it."""
    waits = []
    for number in range(2 * len(files)):
        asked = with_adapters(fixed(1, 64, 1, seed=900 + number), [files[number % len(files)]])
        start = time.perf_counter()
        engine.generate(asked)
        loaded = time.perf_counter() - start
        again = with_adapters(fixed(1, 64, 1, seed=950 + number), [files[number % len(files)]])
        start = time.perf_counter()
        engine.generate(again)
        waits.append(loaded - (time.perf_counter() - start))
    return statistics.median(waits[len(files) :]) * 1e3


if __name__ == "__main__":
    sys.exit(main())
