"""How the kernel benchmark times a call, and the rates that nothing on this GPU can beat by much."""

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton.language as tl

from stoker.kernels.launch import jit

Call = Callable[[], object]

GRAPH_SECONDS = 0.02
READ_BLOCK = 8192


class Ceilings(NamedTuple):
    """Bytes per second of a copy (read plus written) and of a read, and bf16 FLOP per second of a large product."""

    copy: float
    read: float
    product: float

    def __str__(self) -> str:
        return (
            f"copy {self.copy / 1e12:.2f} TB/s, read {self.read / 1e12:.2f} TB/s, "
            f"bf16 product {self.product / 1e12:.0f} TFLOP/s"
        )


def measured_ceilings() -> Ceilings:
    return Ceilings(copy_rate(), read_rate(), product_rate())


def copy_rate() -> float:
    """A 2 GiB device copy. Timed outside a graph: there it would become a copy node, which some cards run slower."""
    source = torch.randint(256, (2**31,), dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.nbytes / statistics.median(elapsed(lambda: target.copy_(source)) for _ in range(20))


def read_rate() -> float:
    """2 GiB of random numbers read once, each program adding up READ_BLOCK of them."""
    source = torch.randn(2**30, dtype=torch.bfloat16)
    programs = source.numel() // READ_BLOCK
    sums = torch.empty(programs)
    return source.nbytes / seconds_per_call([lambda: _add_up[(programs,)](source, sums, READ_BLOCK, num_warps=8)])


@jit
def _add_up(source_ptr, sums_ptr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(tl.load(source_ptr + index).to(tl.float32)))


def product_rate() -> float:
    """A square bf16 product of size 8192 on random numbers (zeros would run faster)."""
    a, b = torch.randn(2, 8192, 8192, dtype=torch.bfloat16)
    return 2 * 8192**3 / seconds_per_call([lambda: a @ b])


def seconds_per_call(calls: list[Call], repeats: int = 7, graph_seconds: float = GRAPH_SECONDS) -> float:
    """Median over replays of one graph that makes the calls in turn, for about `graph_seconds`."""
    make_all(calls)
    once = max(elapsed(lambda: make_all(calls)), 1e-6)
    rounds = max(1, min(200 // len(calls), int(graph_seconds / once)))
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


def elapsed(run: Call) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3
