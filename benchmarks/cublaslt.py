"""What cuBLASLt's other algorithms give for a decode step's products: torch takes the first that the library's
heuristic names, and this times all of them. Weights are rotated, so that none is in the second-level cache.

Run: python -m benchmarks.cublaslt [--model llama3-8b] [--rows 64,128]
"""

import argparse
import ctypes
import statistics
from collections.abc import Callable, Iterator
from ctypes import byref
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.models import SHAPES
from benchmarks.report import print_table, save

MOST = 32
WORKSPACE_BYTES = 64 << 20
CACHE_BYTES = 400_000_000
ROWS = "8,16,32,64,96,128,160,192,224,256"
# Constants of cublasLt.h and library_types.h.
BF16, FP32, COMPUTE_32F, TRANSPOSE, TRANSPOSE_A, MAX_WORKSPACE = 14, 0, 68, 1, 3, 1


class Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Found(NamedTuple):
    name: str
    rows: int
    torch_us: float
    best_us: float
    best: int


class Library:
    """The cuBLASLt that torch has loaded."""

    def __init__(self) -> None:
        maps = Path("/proc/self/maps").read_text().splitlines()
        self._library = ctypes.CDLL(next(line.split()[-1] for line in maps if "libcublasLt.so" in line))
        self.version = int(self._library.cublasLtGetVersion())
        self._handle, self._product, self._wish = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("Create", byref(self._handle))
        self._call("MatmulDescCreate", byref(self._product), COMPUTE_32F, FP32)
        self._call("MatmulDescSetAttribute", self._product, TRANSPOSE_A, byref(ctypes.c_int32(TRANSPOSE)), size(4))
        self._call("MatmulPreferenceCreate", byref(self._wish))
        limit = ctypes.c_uint64(WORKSPACE_BYTES)
        self._call("MatmulPreferenceSetAttribute", self._wish, MAX_WORKSPACE, byref(limit), size(8))
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def algorithms(self, rows: int, width: int, depth: int) -> Iterator[Callable[..., None]]:
        """Each computes y [rows, width] = x [rows, depth] times weight [width, depth] transposed, all in bfloat16."""
        # Row-major matrices are their transposes in cuBLAS's eyes.
        weights, inputs, outputs = (
            self._layout(depth, width),
            self._layout(depth, rows),
            self._layout(width, rows),
        )
        found, count = (Algorithm * MOST)(), ctypes.c_int()
        self._call("MatmulAlgoGetHeuristic", self._handle, self._product, weights, inputs, outputs, outputs,
                   self._wish, MOST, found, byref(count))  # fmt: skip
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        for algorithm in found[: count.value]:

            def run(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, algorithm: Any = algorithm) -> None:
                self._call("Matmul", self._handle, self._product, byref(one), address(weight), weights, address(x),
                           inputs, byref(zero), address(y), outputs, address(y), outputs, byref(algorithm),
                           address(self._workspace), size(WORKSPACE_BYTES),
                           ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))  # fmt: skip

            yield run

    def _layout(self, rows: int, columns: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        shape = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
        self._call("MatrixLayoutCreate", byref(layout), BF16, *shape)
        return layout

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._library, f"cublasLt{name}")(*arguments):
            raise RuntimeError(f"cublasLt{name} failed: {code}")


def address(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def size(count: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(count)


def timed(run: Callable[[int], object], copies: int) -> float:
    """Microseconds of one call, replayed in a graph; it is given the number of the weights to use."""
    repeats, graph, stream = max(copies, 8), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(0)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for number in range(repeats):
            run(number % copies)
    found: list[float] = []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / repeats)
    return statistics.median(found[1:])


def products(model: str) -> dict[str, tuple[int, int, int]]:
    """Width, depth, and how many a step has."""
    shape = SHAPES[model]
    hidden, inner, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    dim = shape.get("head_dim", hidden // shape["num_attention_heads"])
    queries, keys = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    return {"qkv": (queries + 2 * keys, hidden, layers), "o": (hidden, queries, layers),
            "gate_up": (2 * inner, hidden, layers), "down": (hidden, inner, layers),
            "head": (shape["vocab_size"], hidden, 1)}  # fmt: skip


def measure(library: Library, name: str, width: int, depth: int, rows: list[int]) -> Iterator[Found]:
    copies = max(2, min(16, CACHE_BYTES // (2 * width * depth) + 1))
    weights = [torch.randn(width, depth, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    for count in rows:
        x = torch.randn(count, depth, device="cuda", dtype=torch.bfloat16)
        y, wanted = torch.empty(count, width, device="cuda", dtype=torch.bfloat16), F.linear(x, weights[0]).float()
        plain = timed(lambda number, x=x: F.linear(x, weights[number]), copies)
        times: list[float] = []
        for run in library.algorithms(count, width, depth):
            run(x, weights[0], y)
            torch.cuda.synchronize()
            assert (y.float() - wanted).norm() < 5e-3 * wanted.norm(), (name, count, len(times))
            times.append(timed(lambda number, run=run, x=x, y=y: run(x, weights[number], y), copies))
        yield Found(name, count, plain, min(times), times.index(min(times)))


def step_ms(found: list[Found], parts: dict[str, tuple[int, int, int]]) -> tuple[float, float]:
    """Of all layers and the head, with torch's algorithms and with the best ones."""
    counts = [parts[each.name][2] / 1e3 for each in found]
    plain = sum(count * each.torch_us for count, each in zip(counts, found, strict=True))
    return plain, sum(count * min(each.best_us, each.torch_us) for count, each in zip(counts, found, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(SHAPES), default="llama3-8b")
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    rows = [int(count) for count in options.rows.split(",")]
    F.linear(*torch.zeros(2, 16, 16, device="cuda", dtype=torch.bfloat16))
    library, parts = Library(), products(options.model)
    found = [each for name, (width, depth, _) in parts.items() for each in measure(library, name, width, depth, rows)]
    print_table("microseconds of a product", ("product", "rows", "torch", "best", "number"), found)
    sums = [(count, *step_ms([each for each in found if each.rows == count], parts)) for count in rows]
    print_table("milliseconds of a step's products", ("rows", "torch", "best"), sums)
    arguments = {"model": options.model, "cublaslt": library.version}
    print("written to", save("cublaslt", arguments, [each._asdict() for each in found], options.json))


if __name__ == "__main__":
    main()
