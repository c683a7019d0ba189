"""Every kernel at the shapes of an 8B Llama: time, rate, share of the ceiling measured in the same run, and the same
work in torch (SDPA, eager operations; the products are torch's own cuBLAS).

    python -m benchmarks.kernels [--json FILE]

Calls run inside CUDA graphs over rotating random inputs that together exceed the L2 cache; times are medians per call.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kernel_workloads import Call, Workload, workloads

COLD_BYTES = 256 * 2**20
GRAPH_SECONDS = 0.02


@dataclass
class Measurement:
    kernel: str
    shape: str
    microseconds: float
    rate: float
    unit: str
    share: float
    target: str
    met: bool | None
    torch_microseconds: float | None


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description="Measure every kernel on this GPU."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the measurements here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.kernels measures GPU kernels: no CUDA device was found, nothing was run.", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    copy, matmul = copy_bandwidth(), matmul_rate()
    measured = [measure(workload, copy, matmul) for workload in workloads()]
    Console(width=130).print(table(measured, copy, matmul))
    if arguments.json:
        arguments.json.write_text(json.dumps(report(measured, copy, matmul), indent=1))
    return 0


def copy_bandwidth() -> float:
    """Bytes per second, read plus written, of a 2 GiB device copy."""
    source = torch.zeros(2**31, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_per_call([lambda: target.copy_(source)])


def matmul_rate() -> float:
    """FLOP per second of a square bf16 product of size 8192 on random numbers (zeros would run faster)."""
    a, b = torch.randn(2, 8192, 8192, dtype=torch.bfloat16)
    return 2 * 8192**3 / seconds_per_call([lambda: a @ b])


def measure(workload: Workload, copy: float, matmul: float) -> Measurement:
    sets = min(32, math.ceil(COLD_BYTES / workload.moved)) if workload.moved else 2
    pairs = [workload.inputs() for _ in range(sets)]
    seconds = seconds_per_call([ours for ours, _ in pairs])
    torch_calls = [theirs for _, theirs in pairs if theirs is not None]
    baseline = seconds_per_call(torch_calls) * 1e6 if torch_calls else None
    work, ceiling, unit = (workload.moved, copy, "TB/s") if workload.moved else (workload.flops, matmul, "TFLOP/s")
    rate = work / seconds
    share = rate / ceiling
    met = workload.target.met(seconds, rate, share) if workload.target else None
    target = str(workload.target or "")
    return Measurement(workload.kernel, workload.shape, seconds * 1e6, rate, unit, share, target, met, baseline)


def seconds_per_call(calls: list[Call], repeats: int = 7) -> float:
    """Median over replays of one graph that makes the calls in turn, for about GRAPH_SECONDS."""
    make_all(calls)
    once = max(elapsed(lambda: make_all(calls)), 1e-6)
    rounds = max(1, min(200 // len(calls), int(GRAPH_SECONDS / once)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            make_all(calls)
    graph.replay()
    times = [elapsed(graph.replay) for _ in range(repeats)]
    return statistics.median(times) / (rounds * len(calls))


def make_all(calls: list[Call]) -> None:
    for call in calls:
        call()


def elapsed(run: Callable[[], object]) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3


def table(measured: list[Measurement], copy: float, matmul: float) -> Table:
    title = f"{torch.cuda.get_device_name()}: copy {copy / 1e12:.2f} TB/s, bf16 product {matmul / 1e12:.0f} TFLOP/s"
    grid = Table(title=title)
    for name in ("kernel", "shape"):
        grid.add_column(name, no_wrap=True)
    for name in ("time", "rate", "of ceiling", "target", "met", "torch", "speed-up"):
        grid.add_column(name, justify="right", no_wrap=True)
    for m in measured:
        rate = f"{m.rate / 1e12:.{2 if m.unit == 'TB/s' else 0}f} {m.unit}"
        met = {None: "", True: "yes", False: "NO"}[m.met]
        grid.add_row(
            m.kernel, m.shape, f"{m.microseconds:.1f} us", rate, f"{m.share:.0%}", m.target, met,
            *beside_torch(m),
        )  # fmt: skip
    return grid


def beside_torch(m: Measurement) -> tuple[str, str]:
    if m.torch_microseconds is None:
        return "", ""
    return f"{m.torch_microseconds:.1f} us", f"{m.torch_microseconds / m.microseconds:.2f}x"


def report(measured: list[Measurement], copy: float, matmul: float) -> dict[str, object]:
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_bytes_per_s": copy,
        "matmul_flops_per_s": matmul,
        "measurements": [asdict(m) for m in measured],
    }


if __name__ == "__main__":
    sys.exit(main())
