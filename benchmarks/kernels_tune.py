"""Times candidate blocks of the GEMV and of prefill attention on this GPU and writes its table (`--tune`).

Every candidate is checked against torch before it is timed. A product goes to the GEMV only where that beats cuBLAS by
more than the noise.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from rich.console import Console
from triton.runtime.errors import OutOfResources

from benchmarks.kernel_workloads import Case, paged
from benchmarks.kernels_timing import Call, seconds_per_call
from stoker.kernels import tuning
from stoker.kernels.activation import silu_mul
from stoker.kernels.attention import paged_attention
from stoker.kernels.attention_plan import plan
from stoker.kernels.gemv import gemv
from stoker.kernels.tuning import Gemv, Tile, Tiles, Tuned

# Products [width, depth] of an 8B Llama and of a 135M one.
SHAPES = [
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096),
    (960, 576), (3072, 576), (576, 1536), (49152, 576),
]  # fmt: skip
# Gate and up: their product is followed by SiLU(gate) * up, in one kernel or two.
GATED = [(28672, 4096), (3072, 576)]
ONE_ROW = [
    (1, 512, 4), (1, 1024, 4), (1, 1024, 8), (1, 2048, 4), (1, 2048, 8), (1, 4096, 4), (1, 4096, 8), (1, 4096, 16),
    (2, 512, 4), (2, 1024, 8), (2, 2048, 4), (2, 2048, 8), (2, 4096, 8), (4, 256, 4), (4, 512, 4), (4, 1024, 8),
    (8, 256, 4),
]  # fmt: skip
FEW_ROWS = [(1, 1024, 4), (1, 2048, 8), (2, 512, 4), (2, 1024, 8), (2, 2048, 8), (4, 512, 4), (4, 512, 8)]
CANDIDATES = {1: ONE_ROW, 2: FEW_ROWS, 4: FEW_ROWS}
# Per kind of step: candidate tiles, and the steps (new tokens, context of every sequence) whose times count alike.
DECODE = [
    Tile(16, 64, 4, 3), Tile(16, 64, 4, 3, 128), Tile(16, 64, 4, 4, 128), Tile(16, 64, 4, 2), Tile(16, 64, 8, 3),
    Tile(16, 64, 8, 4), Tile(16, 32, 4, 3), Tile(16, 32, 4, 4), Tile(16, 32, 4, 5), Tile(16, 128, 8, 3),
]  # fmt: skip
MIXED = [
    Tile(64, 64, 4, 3), Tile(64, 64, 4, 3, 168), Tile(64, 64, 4, 3, 128), Tile(64, 32, 4, 3, 128),
    Tile(64, 32, 4, 4, 128), Tile(32, 64, 4, 3, 128), Tile(32, 32, 4, 4),
]  # fmt: skip
PREFILL = [
    Tile(128, 64, 8, 3), Tile(128, 64, 8, 3, 128), Tile(128, 64, 8, 2, 128), Tile(128, 64, 8, 4, 128),
    Tile(128, 128, 8, 3), Tile(128, 32, 8, 3, 128), Tile(64, 64, 4, 3),
]  # fmt: skip
STEPS = {
    "decode": (DECODE, [[(1, 1024)] * 64, [(1, 1024)] * 256, [(1, 8192)] * 8, [(1, 8192)]]),
    "mixed": (MIXED, [[(448, 1024)] + [(1, 1024)] * 64, [(512, 8192)]]),
    "prefill": (PREFILL, [[(8192, 8192)], [(2048, 2048)] * 4]),
}
FEW_SEQUENCES = [[(1, 8192)], [(1, 1024)], [(1, 2048)] * 4, [(1, 8192)] * 8]
HEAD_SIZES = (64, 128)
COLD_BYTES = 256 * 2**20
GRAPH_SECONDS = 0.005
GAIN = 0.98

Choice = TypeVar("Choice", Gemv, Tile, Tiles)

log = Console(width=140, highlight=False).print


def tune() -> None:
    name = torch.cuda.get_device_name()
    attention = {dim: best_tiles(dim) for dim in HEAD_SIZES}
    measured = [best_blocks(rows, *shape) for shape in SHAPES for rows in CANDIDATES]
    write(tuning.path(name), Tuned(attention, tuple(measured)), name)
    tuning.tuned.cache_clear()


def best_blocks(rows: int, width: int, depth: int) -> Gemv:
    sets = min(200, math.ceil(COLD_BYTES / (2 * width * depth)))
    pairs = [(torch.randn(rows, depth), torch.randn(width, depth)) for _ in range(sets)]
    pairs = [(x.bfloat16(), weight.bfloat16()) for x, weight in pairs]
    gated = (width, depth) in GATED
    cublas = (lambda x, weight: silu_mul(F.linear(x, weight))) if gated else F.linear
    times = {Gemv(rows, width, depth, 0, 0, 0, 0): timed(pairs, cublas) * GAIN}
    for block_n, block_k, warps in CANDIDATES[rows]:
        if block_k < 2 * depth:
            entry = Gemv(rows, width, depth, block_n, block_k, warps, 1)
            check_product(entry, *pairs[0])
            times[entry] = timed(pairs, lambda x, weight, entry=entry: gemv(x, weight, None, entry, gated))
    return fastest(f"gemv M {rows}, {depth} -> {width}", times)


def timed(
    pairs: list[tuple[torch.Tensor, torch.Tensor]], product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> float:
    calls: list[Call] = [lambda x=x, weight=weight: product(x, weight) for x, weight in pairs]
    return seconds_per_call(calls, repeats=5, graph_seconds=GRAPH_SECONDS)


def check_product(entry: Gemv, x: torch.Tensor, weight: torch.Tensor) -> None:
    expected = x.double() @ weight[:1024].double().T
    error = (gemv(x, weight, None, entry)[:, :1024] - expected).norm() / expected.norm()
    assert error < 1e-2, (entry, error)


def best_tiles(dim: int) -> Tiles:
    decode, mixed, prefill = (best_tile(kind, dim) for kind in STEPS)
    return best_split(dim, Tiles(decode, mixed, prefill))


def best_tile(kind: str, dim: int) -> Tile:
    candidates, steps = STEPS[kind]
    cases = [paged(step, dim) for step in steps]
    return fastest(f"{kind}, head size {dim}", {tile: typical(Tiles(tile, tile, tile), cases) for tile in candidates})


def best_split(dim: int, tiles: Tiles) -> Tiles:
    cases = [paged(step, dim) for step in FEW_SEQUENCES]
    candidates = [tiles._replace(split=split) for split in (1, 2, 4, 8)]
    return fastest(f"split contexts, head size {dim}", {tiles: typical(tiles, cases) for tiles in candidates})


def typical(tiles: Tiles, cases: list[Case]) -> float:
    """Geometric mean of the cases' seconds."""
    return math.prod(seconds(tiles, case) for case in cases) ** (1 / len(cases))


def seconds(tiles: Tiles, case: Case) -> float:
    def attend(own: Tiles | None) -> torch.Tensor:
        """Without tiles of its own: those of a device that was never tuned."""
        return paged_attention(*case, case[0].shape[2] ** -0.5, choose=lambda *shape: plan(*shape[:-1], tuned=own))

    expected = attend(None)
    try:
        torch.testing.assert_close(attend(tiles), expected, rtol=2e-2, atol=2e-2)
    except OutOfResources:
        return math.inf
    return seconds_per_call([lambda: attend(tiles)], repeats=5, graph_seconds=GRAPH_SECONDS)


def fastest(what: str, times: dict[Choice, float]) -> Choice:
    ordered = sorted(times, key=lambda choice: times[choice])
    log(f"{what}: " + "; ".join(f"{tuple(choice)} {times[choice] * 1e6:.1f} us" for choice in ordered[:7]))
    return ordered[0]


def write(file: Path, table: Tuned, device_name: str) -> None:
    attention = ",\n".join(f'  "{dim}": {json.dumps(tiles)}' for dim, tiles in table.attention.items())
    gemv = ",\n".join(f"  {json.dumps(entry)}" for entry in table.gemv)
    device = json.dumps(device_name)
    file.write_text(f'{{\n "device": {device},\n "attention": {{\n{attention}\n }},\n "gemv": [\n{gemv}\n ]\n}}\n')
