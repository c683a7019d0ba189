"""Products of one to four rows with a weight matrix, where plain reading of the weight beats cuBLAS.

A program owns BLOCK_N rows of the weight and streams them once, BLOCK_K columns at a time, against all rows of x; there
are no partial results to combine, so a result depends on no launch order. Which shapes take this path, and with what
blocks, stands in the tuned table of the GPU; every other product is cuBLAS.
"""

import torch
import torch.nn.functional as F
import triton.language as tl

from stoker.kernels.launch import cdiv, jit
from stoker.kernels.tuning import MAX_GEMV_ROWS, Gemv, gemv_for, tuned


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows = x.numel() // x.shape[-1]
    if rows > MAX_GEMV_ROWS or weight.dtype != torch.bfloat16 or not (x.is_contiguous() and weight.is_contiguous()):
        return F.linear(x, weight, bias)
    chosen = gemv_for(rows, weight.shape[0], weight.shape[1], tuned(x.device))
    return F.linear(x, weight, bias) if chosen is None else gemv(x, weight, bias, chosen)


def gemv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, chosen: Gemv) -> torch.Tensor:
    """x [..., K] of at most chosen.rows rows times weight [N, K] transposed, plus bias [N] -> [..., N]."""
    width, depth = weight.shape
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    _gemv[(cdiv(width, chosen.block_n),)](
        x, weight, weight if bias is None else bias, out, x.numel() // depth, width,
        depth, chosen.rows, chosen.block_n, chosen.block_k, bias is not None,
        num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip
    return out


@jit(do_not_specialize=["rows"])
def _gemv(
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, width,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    step = tl.arange(0, BLOCK_K)[None, :]
    weights = weight_ptr + line.to(tl.int64) * DEPTH + step
    totals = ()
    for _ in tl.static_range(ROWS):  # pyright: ignore[reportGeneralTypeIssues]
        totals = totals + (tl.zeros([BLOCK_N, BLOCK_K], tl.float32),)
    for start in range(0, DEPTH, BLOCK_K):
        inside = (line < width) & (start + step < DEPTH)
        weight = tl.load(weights + start, mask=inside, other=0).to(tl.float32)
        sums = ()
        for row in tl.static_range(ROWS):  # pyright: ignore[reportGeneralTypeIssues]
            # Addressed like the weights, so that x arrives in the same threads, without a detour over shared memory.
            x = tl.load(x_ptr + row * DEPTH + start + step + line * 0, mask=inside & (row < rows), other=0)
            sums = sums + (totals[row] + weight * x.to(tl.float32),)
        totals = sums
    for row in tl.static_range(ROWS):  # pyright: ignore[reportGeneralTypeIssues]
        out = tl.sum(totals[row], 1, keep_dims=True)
        if BIAS:
            out += tl.load(bias_ptr + line, mask=line < width, other=0).to(tl.float32)
        tl.store(out_ptr + row * width + line, out.to(out_ptr.dtype.element_ty), mask=(line < width) & (row < rows))
