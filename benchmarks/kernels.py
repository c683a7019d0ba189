"""Every kernel at the shapes of an 8B Llama: time, rate, share of the ceiling measured in the same run, and the same
work in torch (SDPA, eager operations; the products are torch's own cuBLAS) and, where installed, in liger-kernel and
FlashInfer.

    python -m benchmarks.kernels [--tune] [--json FILE]

Calls run inside CUDA graphs over rotating random inputs that together exceed the L2 cache; times are medians per call.
`--tune` first times candidate blocks of the GEMV and of prefill attention and writes this GPU's table.
"""

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from rich.console import Console
from rich.table import Table

from benchmarks.kernel_workloads import Calls, Workload, workloads
from benchmarks.kernels_timing import Ceilings, measured_ceilings, seconds_per_call
from benchmarks.kernels_tune import tune

COLD_BYTES = 256 * 2**20


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
    others: dict[str, float]
    """Microseconds of the same work elsewhere."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description="Measure every kernel on this GPU."
    )
    parser.add_argument("--tune", action="store_true", help="choose blocks first and write this GPU's table")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the measurements here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.kernels measures GPU kernels: no CUDA device was found, nothing was run.", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    if arguments.tune:
        tune()
    ceilings = measured_ceilings()
    measured = [measure(workload, ceilings) for workload in workloads()]
    Console(width=180).print(table(measured, ceilings))
    if arguments.json:
        arguments.json.write_text(json.dumps(report(measured, ceilings), indent=1))
    return 0


def measure(workload: Workload, ceilings: Ceilings) -> Measurement:
    sets = min(32, math.ceil(COLD_BYTES / workload.moved)) if workload.moved else 2
    made = [workload.inputs() for _ in range(sets)]
    seconds = seconds_per_call([calls["stoker"] for calls in made])
    timed = {name: seconds_elsewhere(name, workload, made) for name in made[0] if name != "stoker"}
    others = {name: seconds * 1e6 for name, seconds in timed.items() if seconds is not None}
    work, unit = (workload.moved, "TB/s") if workload.moved else (workload.flops, "TFLOP/s")
    ceiling = getattr(ceilings, workload.ceiling)
    rate = work / seconds
    share = rate / ceiling
    met = workload.target.met(seconds, rate, ceilings.copy) if workload.target else None
    target = str(workload.target or "")
    return Measurement(workload.kernel, workload.shape, seconds * 1e6, rate, unit, share, target, met, others)


def seconds_elsewhere(name: str, workload: Workload, made: list[Calls]) -> float | None:
    try:
        return seconds_per_call([calls[name] for calls in made])
    except Exception as error:  # Another library's failure, of whatever class, must not cost the measurements of ours.
        print(f"{workload.kernel}, {workload.shape}: {name} failed and is left out: {error!r}", file=sys.stderr)
        return None


def table(measured: list[Measurement], ceilings: Ceilings) -> Table:
    grid = Table(title=f"{torch.cuda.get_device_name()}: {ceilings}")
    for name in ("kernel", "shape"):
        grid.add_column(name, no_wrap=True)
    for name in ("time", "rate", "share", "target", "met", "torch", "others"):
        grid.add_column(name, justify="right", no_wrap=True)
    for m in measured:
        rate = f"{m.rate / 1e12:.{2 if m.unit == 'TB/s' else 0}f} {m.unit}"
        met = {None: "", True: "yes", False: "NO"}[m.met]
        grid.add_row(
            m.kernel, m.shape, f"{m.microseconds:.1f} us", rate, f"{m.share:.0%}", m.target, met,
            *beside(m),
        )  # fmt: skip
    return grid


def beside(m: Measurement) -> tuple[str, str]:
    shown = {name: f"{other:.1f} us ({other / m.microseconds:.2f}x)" for name, other in m.others.items()}
    return shown.pop("torch", ""), ", ".join(f"{name} {text}" for name, text in shown.items())


def report(measured: list[Measurement], ceilings: Ceilings) -> dict[str, object]:
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "ceilings": ceilings._asdict(),
        "measurements": [asdict(m) for m in measured],
    }


if __name__ == "__main__":
    sys.exit(main())
