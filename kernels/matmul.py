"""Products whose rows don't depend on each other: one tile and one order of sums, however many rows there are.

A result is a sum over parts of the depth of fixed length, first to last; each part's sum is taken by itself. Weights
whose tiles fill the device have one part. The others have a program for every part, and `_add_parts` after it, as long
as rows are few; for many rows a program goes through all parts of its tile. Both do the same arithmetic in the same
order, so which of them runs shows in no bit.
"""

import torch
import triton.language as tl
from torch import Tensor

from stoker.kernels.launch import await_inputs, cdiv, jit, starts_early

BLOCK_M = 128
BLOCK_N = 128
# Rows of tiles that share what they read of the weight while it is in the second-level cache.
GROUP = 8
# No part is shorter, unless the whole depth is.
LEAST_DEPTH = 1024
# About two for every processor of an H200; not the device's own number, so that all give the same results.
PROGRAMS = 256


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    (width, depth), early = weight.shape, starts_early(x.device)
    flat = x.reshape(-1, depth).contiguous()
    rows, parts, block_k = len(flat), parts_of(width, depth), 128 // x.element_size()
    tiles, share = cdiv(rows, BLOCK_M) * cdiv(width, BLOCK_N), cdiv(cdiv(depth, parts), block_k) * block_k
    spread = parts > 1 and tiles <= PROGRAMS // 4
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    partial = torch.empty((parts, rows, width), dtype=torch.float32, device=x.device) if spread else out
    added, has_bias = weight if bias is None else bias, bias is not None
    _product[(tiles, parts if spread else 1)](
        flat, weight, added, partial, rows, width, depth, parts, share, BLOCK_M, BLOCK_N, block_k, GROUP,
        parts > 1 and not spread, has_bias and not spread, "tf32x3" if x.dtype == torch.float32 else "tf32", early,
        num_warps=8, num_stages=3, launch_pdl=early,
    )  # fmt: skip
    if spread:
        _add_parts[(cdiv(width, 1024), rows)](
            partial, added, out, rows, width, parts, 1024, has_bias, early, num_warps=4, launch_pdl=early
        )
    return out


def parts_of(width: int, depth: int) -> int:
    """A power of two, from the weight's shape alone."""
    return 1 << max(1, min(PROGRAMS // cdiv(width, BLOCK_N), depth // LEAST_DEPTH)).bit_length() - 1


@jit(do_not_specialize=["rows", "parts"])
def _product(
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, width, depth, parts, share,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, SUMMED: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    group = GROUP * tl.cdiv(width, BLOCK_N)
    first = tl.program_id(0) // group * GROUP
    height = tl.minimum(tl.cdiv(rows, BLOCK_M) - first, GROUP)
    row = (first + tl.program_id(0) % group % height) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    column = tl.program_id(0) % group // height * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    operands = (x_ptr + row.to(tl.int64) * depth, row < rows, weight_ptr + column.to(tl.int64) * depth, column < width)
    total = _summed(operands, tl.program_id(1) * share, share, depth, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
    if SUMMED:
        for part in range(1, parts):
            total += _summed(operands, part * share, share, depth, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
    if BIAS:
        total += tl.load(bias_ptr + column, mask=column < width, other=0).to(tl.float32)
    place = (tl.program_id(1) * rows.to(tl.int64) + row) * width + column
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=(row < rows) & (column < width))


@jit
def _summed(
    operands, begin, share, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N], float32, over `share` columns of the operands."""
    x_rows, is_row, weights, is_column = operands
    across, down = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_K)[:, None]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(begin, tl.minimum(begin + share, depth), BLOCK_K):
        x = tl.load(x_rows + start + across, mask=is_row & (start + across < depth), other=0)
        weight = tl.load(weights + start + down, mask=is_column & (start + down < depth), other=0)
        sums = tl.dot(x, weight, sums, input_precision=PRECISION)
    return sums


@jit(do_not_specialize=["rows", "parts"])
def _add_parts(
    partial_ptr, bias_ptr, out_ptr, rows, width, parts, BLOCK: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr
):
    await_inputs(EARLY)
    column, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    total = tl.load(partial_ptr + row * width + column, mask=column < width, other=0)
    for part in range(1, parts):
        total += tl.load(partial_ptr + (part * rows + row) * width + column, mask=column < width, other=0)
    if BIAS:
        total += tl.load(bias_ptr + column, mask=column < width, other=0).to(tl.float32)
    tl.store(out_ptr + row * width + column, total.to(out_ptr.dtype.element_ty), mask=column < width)
