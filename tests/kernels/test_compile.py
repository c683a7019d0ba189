"""The kernels of an 8B Llama compile for Hopper without a GPU, and stay out of local memory."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stoker.kernels import (
    activation,
    attention,
    filters,
    full_attention,
    gemv,
    lora,
    matmul,
    norm,
    rope,
    sampling,
    steering,
    tuning,
)
from stoker.kernels.attention_plan import Plan, plan
from stoker.kernels.tuning import Tiles

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_LIMIT = 227 * 1024
# Compiler versions differ by a register or two; that much costs nothing. A measured cap on registers pays for more.
SPILL_LIMIT = 16
CAPPED_SPILL_LIMIT = 128
POINTERS = {
    "cos_sin": "fp32", "positions": "i32", "slots": "i64", "table": "i32", "query_start": "i32", "context": "i32",
    "peak": "fp32", "total": "fp32", "partial": "fp32", "temperature": "fp32", "top_k": "i32", "top_p": "fp32",
    "min_p": "fp32", "seed": "i64", "position": "i64", "peaks": "fp32", "scores": "fp32", "winners": "i32",
    "tokens": "i64", "masses": "fp32", "tops": "fp32", "summary": "fp32", "limits": "i32", "lists": "i16",
    "counts": "i32", "seen": "i32", "lines": "i32", "bits": "i32", "presence": "fp32", "frequency": "fp32",
    "repetition": "fp32", "middle": "fp32", "adapters": "i32",
}  # fmt: skip


def argument_type(name: str) -> str:
    if name.endswith("_ptr"):
        return "*" + POINTERS.get(name.removesuffix("_ptr"), "bf16")
    return "fp32" if name in ("eps", "scale") else "i32"


def compile_for_hopper(kernel, constants: dict[str, object], warps: int, stages: int = 3, registers: int = 0):
    """What a call with 16-byte aligned tensors and strides compiles to."""
    constants = constants | {name: True for name in ("EARLY",) if name in kernel.arg_names}
    runtime = [name for name in kernel.arg_names if name not in constants]
    signature = {name: argument_type(name) if name in runtime else "constexpr" for name in kernel.arg_names}
    aligned = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name in runtime
        if signature[name] != "fp32" and name not in ("tokens", "sequences", "table_stride")
    }
    folded = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, folded, aligned)
    options = {"num_warps": warps, "num_stages": stages} | ({"maxnreg": registers} if registers else {})
    return triton.compile(source, target=HOPPER, options=options)


def test_encoder_attention(tmp_path):
    constants = {"DIM": 64, "BLOCK_M": 64, "BLOCK_N": 64, "PRECISION": "tf32"}
    compiled = compile_for_hopper(full_attention._full_attention, constants, 4)
    assert local_bytes(compiled, tmp_path) <= SPILL_LIMIT
    assert "wgmma.mma_async" in compiled.asm["ptx"]


def local_bytes(compiled, folder: Path) -> int:
    """Stack and local memory per thread: registers that did not fit."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+).*LOCAL:(\d+)", usage)
    assert found, usage
    return int(found[1]) + int(found[2])


def attend(chosen: Plan, group: int = 4, dim: int = 128, window: int = 0, decode: bool | None = None):
    is_decode = not chosen.peel if decode is None else decode
    constants = {
        "GROUP": group, "DIM": dim, "CACHE_BLOCK": 16, "BLOCK_M": chosen.block_m, "BLOCK_Q": chosen.block_m // group,
        "BLOCK_N": chosen.block_n, "DECODE": is_decode, "SPLIT": chosen.segments > 1, "LEAST": chosen.least,
        "PEEL": chosen.peel, "WINDOW": window,
        "PRECISION": "tf32",
    }  # fmt: skip
    return compile_for_hopper(attention._attend, constants, chosen.warps, chosen.stages, chosen.registers)


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize(("tokens", "sequences"), [(1, 0), (256, 0), (600, 32), (8192, 4)])
def test_attention(tokens, sequences, tmp_path):
    chosen = plan(tokens, sequences, 8192, 32, 8, 128, torch.bfloat16.itemsize, 132)
    compiled = attend(chosen)
    assert local_bytes(compiled, tmp_path) <= SPILL_LIMIT
    assert compiled.metadata.shared <= SHARED_LIMIT
    product = "wgmma.mma_async" if chosen.block_m >= 64 else "mma.sync"
    assert product in compiled.asm["ptx"] and "cp.async" in compiled.asm["ptx"]


@pytest.mark.parametrize(("tokens", "sequences"), [(256, 256), (600, 32), (8192, 4)])
def test_attention_with_a_window(tokens, sequences, tmp_path):
    chosen = plan(tokens, sequences, 4096, 32, 8, 128, torch.bfloat16.itemsize, 132)
    assert local_bytes(attend(chosen, window=4096), tmp_path) <= SPILL_LIMIT


SHIPPED = [
    (file.stem, dim, kind)
    for file in Path(tuning.__file__).parent.glob("tuned_*.json")
    for dim in tuning.read(file).attention
    for kind in Tiles._fields[:3]
]


@pytest.mark.parametrize(("table", "dim", "kind"), SHIPPED)
def test_measured_tiles(table, dim, kind, tmp_path):
    tile = getattr(tuning.read(Path(tuning.__file__).with_name(f"{table}.json")).attention[dim], kind)
    chosen = Plan(tile.block_m, tile.block_n, 1, kind != "decode", tile.warps, tile.stages, tile.registers)
    compiled = attend(chosen, dim=dim)
    assert local_bytes(compiled, tmp_path) <= (CAPPED_SPILL_LIMIT if tile.registers else SPILL_LIMIT)
    assert compiled.metadata.shared <= SHARED_LIMIT


LORA = {
    "shrink": (lora._shrink, {"DEPTH": 4096, "BLOCK_K": 128}),
    "expand": (lora._expand, {"BLOCK_N": 128}),
}


@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(("kernel", "constants"), LORA.values(), ids=LORA)
def test_adapters(kernel, constants, rows, rank, tmp_path):
    cuts = {"CUTS": 256 // rows} if "CUTS" in kernel.arg_names else {}
    compiled = compile_for_hopper(kernel, {**constants, **cuts, "RANK": rank, "BLOCK_R": rank, "BLOCK_M": rows}, 4)
    assert local_bytes(compiled, tmp_path) <= SPILL_LIMIT
    assert compiled.metadata.shared <= SHARED_LIMIT
    assert ("wgmma.mma_async" if rows >= 64 else "mma.sync") in compiled.asm["ptx"]


ELEMENTWISE = {
    "rms_norm": (norm._rms_norm, {"WIDTH": 4096, "BLOCK": 4096, "ADD": False}, 8),
    "add_rms_norm": (norm._rms_norm, {"WIDTH": 4096, "BLOCK": 4096, "ADD": True}, 8),
    "silu_mul": (activation._silu_mul, {"WIDTH": 14336, "BLOCK": 2048}, 4),
    "rope_store": (
        rope._rope_store,
        {"GROUP": 4, "GROUP_BLOCK": 4, "DIM": 128, "CACHE_BLOCK": 16, "TOKENS": 4, "NORM": False},
        4,
    ),
    "rope_store with norms": (
        rope._rope_store,
        {"GROUP": 4, "GROUP_BLOCK": 4, "DIM": 128, "CACHE_BLOCK": 16, "TOKENS": 4, "NORM": True},
        4,
    ),
    "merge": (
        attention._merge,
        {"SEGMENTS": 32, "LEAST": 2, "BLOCK_N": 64, "WINDOW": 0, "DIM": 128},
        4,
    ),
    "scan": (sampling._scan, {"VOCAB": 128256}, 4),
    "collect": (filters._collect, {"VOCAB": 128256}, 4),
    "log_total": (steering._log_total, {"VOCAB": 128256, "BLOCK": 4096}, 8),
    "steer": (steering._steer, {"VOCAB": 128256, "MASKED": True, "BLOCK": 2048}, 4),
    "gemv": (gemv._gemv, {"DEPTH": 4096, "ROWS": 1, "BLOCK_N": 1, "BLOCK_K": 2048, "BIAS": False, "GATED": False}, 8),
    "gated gemv": (
        gemv._gemv,
        {"DEPTH": 4096, "ROWS": 1, "BLOCK_N": 1, "BLOCK_K": 2048, "BIAS": False, "GATED": True},
        8,
    ),
}


@pytest.mark.parametrize(("kernel", "constants", "warps"), ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_memory_bound_kernels_load_sixteen_bytes_at_a_time(kernel, constants, warps, tmp_path):
    compiled = compile_for_hopper(kernel, constants, warps)
    assert local_bytes(compiled, tmp_path) <= SPILL_LIMIT
    assert ("griddepcontrol.wait" in compiled.asm["ptx"]) == ("EARLY" in kernel.arg_names)
    assert "ld.global.v4.b32" in compiled.asm["ptx"] or "ld.global.L1" in compiled.asm["ptx"]


ROWWISE = {
    "settle": (
        sampling._settle,
        {"VOCAB": 128256, "CHUNKS": 32, "CHUNKS_BLOCK": 32, "DIGITS": 8},
        4,
    ),
    "draw": (
        filters._draw,
        {"VOCAB": 128256, "CHUNKS": 32, "CHUNKS_BLOCK": 32, "TILE": 4096, "DIGITS": 8},
        16,
    ),
}


@pytest.mark.parametrize(("kernel", "constants", "warps"), ROWWISE.values(), ids=ROWWISE)
def test_rowwise_kernels_stay_in_registers(kernel, constants, warps, tmp_path):
    assert local_bytes(compile_for_hopper(kernel, constants, warps), tmp_path) <= SPILL_LIMIT


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("several", [False, True])
def test_batch_invariant_products(several, dtype, tmp_path, monkeypatch):
    for name in ("x", "weight", "bias", "out"):
        monkeypatch.setitem(POINTERS, name, dtype)
    tile = {"BLOCK_M": matmul.BLOCK_M, "BLOCK_N": matmul.BLOCK_N, "BLOCK_K": 64 if dtype == "bf16" else 32}
    how = {
        "GROUP": matmul.GROUP,
        "SUMMED": several,
        "BIAS": False,
        "PRECISION": "tf32x3" if dtype == "fp32" else "tf32",
    }
    compiled = compile_for_hopper(matmul._product, {**tile, **how}, 8)
    assert dtype == "fp32" or local_bytes(compiled, tmp_path) <= SPILL_LIMIT
    assert compiled.metadata.shared <= SHARED_LIMIT // 2, "two programs share a processor"
    assert "wgmma.mma_async" in compiled.asm["ptx"] and "cp.async" in compiled.asm["ptx"]


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_batch_invariant_attention(dim, decode, tmp_path):
    tiles = tuning.read(Path(tuning.__file__).with_name("tuned_h200.json")).attention[dim]
    chosen = plan(1, 0 if decode else 1, 8192, 32, 8, dim, 2, 132, tiles, invariant=True)
    assert chosen == plan(8192, 4, 8192, 32, 8, dim, 2, 132, tiles, invariant=True)
    compiled = attend(chosen, dim=dim, decode=decode)
    assert local_bytes(compiled, tmp_path) <= SPILL_LIMIT
    assert "wgmma.mma_async" in compiled.asm["ptx"]
