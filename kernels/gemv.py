"""Products of one to four rows with a weight matrix, where plain reading of the weight beats cuBLAS.

A program owns BLOCK_N rows of the weight and streams them once, BLOCK_K columns at a time, against all rows of x; there
are no partial results to combine, so a result depends on no launch order. The first columns are fetched before x is
there. A gated product owns the same rows of gate and up, and applies SiLU(gate) * up to their results. Which shapes
take this path, and with what blocks, stands in the tuned table of the GPU; every other product is cuBLAS.
"""

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from stoker.kernels.activation import silu_mul
from stoker.kernels.launch import await_inputs, cdiv, jit, starts_early
from stoker.kernels.tuning import MAX_GEMV_ROWS, Gemv, gemv_for, tuned


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return gemv(x, weight, bias, chosen) if (chosen := blocks(x, weight)) else F.linear(x, weight, bias)


def gated_linear(x: Tensor, gate_up: Tensor) -> Tensor:
    chosen = blocks(x, gate_up)
    return gemv(x, gate_up, None, chosen, gated=True) if chosen else silu_mul(F.linear(x, gate_up))


def blocks(x: Tensor, weight: Tensor) -> Gemv | None:
    """None: cuBLAS is as fast or faster."""
    rows = x.numel() // x.shape[-1]
    if rows > MAX_GEMV_ROWS or weight.dtype != torch.bfloat16 or not (x.is_contiguous() and weight.is_contiguous()):
        return None
    return gemv_for(rows, weight.shape[0], weight.shape[1], tuned(x.device).gemv)


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Gemv, gated: bool = False) -> Tensor:
    """x [..., K] of at most chosen.rows rows times weight [N, K] transposed, plus bias [N] -> [..., N].

    Gated, the upper half of weight are gates: -> [..., N / 2].
    """
    width, depth, early = weight.shape[0] // (1 + gated), weight.shape[1], starts_early(x.device)
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    _gemv[(cdiv(width, chosen.block_n),)](
        x, weight, weight if bias is None else bias, out, x.numel() // depth, width,
        depth, chosen.rows, chosen.block_n, chosen.block_k, bias is not None, gated, early,
        num_warps=chosen.warps, num_stages=chosen.stages, launch_pdl=early,
    )  # fmt: skip
    return out


@jit(do_not_specialize=["rows"])
def _gemv(
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, width,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr,
    GATED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    inside = line < width
    weights = weight_ptr + line.to(tl.int64) * DEPTH
    sums = _products(x_ptr, weights, inside, rows, width, DEPTH, ROWS, BLOCK_N, BLOCK_K, GATED, EARLY)
    for row in tl.static_range(ROWS):  # pyright: ignore[reportGeneralTypeIssues]
        out = tl.sum(sums[row], 1, keep_dims=True)
        if BIAS:
            out += tl.load(bias_ptr + line, mask=inside, other=0).to(tl.float32)
        if GATED:
            # Rounded as the results of two products would be.
            gate = out.to(out_ptr.dtype.element_ty).to(tl.float32)
            up = tl.sum(sums[ROWS + row], 1, keep_dims=True).to(out_ptr.dtype.element_ty).to(tl.float32)
            out = gate * tl.sigmoid(gate) * up
        tl.store(out_ptr + row * width + line, out.to(out_ptr.dtype.element_ty), mask=inside & (row < rows))


@jit
def _products(
    x_ptr, weights, inside, rows, width, DEPTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sums of products [BLOCK_N, BLOCK_K], still to be added along the columns: one per row of x, then those of up."""
    place = tl.arange(0, BLOCK_K)[None, :]
    second = width.to(tl.int64) * DEPTH
    sums = ()
    for _ in tl.static_range(ROWS * (1 + GATED)):  # pyright: ignore[reportGeneralTypeIssues]
        sums = sums + (tl.zeros([BLOCK_N, BLOCK_K], tl.float32),)
    pair = _pair(weights, second, inside & (place < DEPTH), place, GATED)
    await_inputs(EARLY)
    sums = _added(sums, pair, x_ptr, inside & (place < DEPTH), rows, place, DEPTH, ROWS, BLOCK_N, GATED)
    for start in range(BLOCK_K, DEPTH, BLOCK_K):
        mask = inside & (start + place < DEPTH)
        pair = _pair(weights, second, mask, start + place, GATED)
        sums = _added(sums, pair, x_ptr, mask, rows, start + place, DEPTH, ROWS, BLOCK_N, GATED)
    return sums


@jit
def _pair(weights, second, mask, place, GATED: tl.constexpr):
    """Weights at `place`, or those of gate and up."""
    weight = tl.load(weights + place, mask=mask, other=0)
    if GATED:
        return weight, tl.load(weights + second + place, mask=mask, other=0)
    else:
        return (weight,)


@jit
def _added(
    sums, pair, x_ptr, mask, rows, place, DEPTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    added = ()
    for number in tl.static_range(ROWS * (1 + GATED)):  # pyright: ignore[reportGeneralTypeIssues]
        # Addressed like the weights, so that x arrives in the same threads, without a detour over shared memory.
        x_row = x_ptr + number % ROWS * DEPTH + place + tl.zeros([BLOCK_N, 1], tl.int32)
        x = tl.load(x_row, mask=mask & (number % ROWS < rows), other=0).to(tl.float32)
        added = added + (sums[number] + pair[number // ROWS].to(tl.float32) * x,)
    return added
