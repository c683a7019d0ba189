"""Low-rank adapters in Triton: y += x A^T B^T, where every row has its own adapter's A and B, or none.

A program goes through the adapters that its tile of rows names, in whatever order, one product each; a tile that names
none ends at once. For few rows x A^T is cut along x into parts that are added in order, not as they end.
"""

import torch
import triton.language as tl
from torch import Tensor

from stoker.kernels.launch import await_inputs, cdiv, jit, power_of_two, starts_early


def add_lora(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor, first: int, tile: tuple[int, int] | None = None
) -> None:
    (tokens, depth), rank, parts, early = x.shape, b.shape[2], a.shape[1] // b.shape[2], starts_early(x.device)
    rest = (y.shape[1] - first) // max(1, parts - 1)
    # Three kinds of steps: what warms a model up compiles them all.
    rows, cuts = tile or ((16, min(16, cdiv(depth, 128))) if tokens <= 128 else (64, 4 if tokens <= 1024 else 1))
    tiles, lines = cdiv(tokens, rows), max(16, power_of_two(rank))
    middle = torch.empty(cuts, tokens, parts, rank, dtype=torch.float32, device=x.device)
    _shrink[(tiles, parts, cuts)](
        x, a, slots, middle, tokens, x.stride(0), a.stride(0), depth, rank, rows, 128, lines, early, launch_pdl=early
    )
    _expand[(tiles, parts, cdiv(max(first, rest), 128))](
        y, middle, b, slots, tokens, y.stride(0), b.stride(0), first, rest, cuts, rank, rows, 128, lines, early,
        launch_pdl=early,
    )  # fmt: skip


@jit(do_not_specialize=["tokens"])
def _shrink(
    x_ptr, a_ptr, adapters_ptr, middle_ptr, tokens, x_stride, a_stride, DEPTH: tl.constexpr, RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    row, line = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_R)[None, :]
    part, cut = tl.program_id(1), tl.program_id(2)
    out = middle_ptr + ((cut * tokens + row) * tl.num_programs(1) + part) * RANK + line
    left = tl.load(adapters_ptr + row, mask=row < tokens, other=0)
    while tl.max(left) > 0:
        slot, sums = tl.max(left), tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        a_line = a_ptr + (slot - 1).to(tl.int64) * a_stride + (part * RANK + line) * DEPTH
        for start in range(cut * BLOCK_K, DEPTH, tl.num_programs(2) * BLOCK_K):
            across, down = start + tl.arange(0, BLOCK_K)[None, :], start + tl.arange(0, BLOCK_K)[:, None]
            x = tl.load(x_ptr + row.to(tl.int64) * x_stride + across, mask=(left == slot) & (across < DEPTH), other=0)
            a = tl.load(a_line + down, mask=(line < RANK) & (down < DEPTH), other=0)
            sums = tl.dot(x, a, sums, input_precision="ieee")
        tl.store(out, sums, mask=(left == slot) & (line < RANK))
        left = tl.where(left == slot, 0, left)


@jit(do_not_specialize=["tokens", "first", "rest"])
def _expand(
    y_ptr, middle_ptr, b_ptr, adapters_ptr, tokens, y_stride, b_stride, first, rest, CUTS: tl.constexpr,
    RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    row, line = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_R)
    part, column = tl.program_id(1), tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    inside = column < tl.where(part == 0, first, rest)
    place = tl.where(part == 0, 0, first + (part - 1) * rest) + column
    left = tl.load(adapters_ptr + row, mask=row < tokens, other=0)
    mine, cells = (left > 0) & inside, y_ptr + row.to(tl.int64) * y_stride + place
    sums, middle = tl.load(cells, mask=mine, other=0).to(tl.float32), tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for cut in tl.static_range(CUTS):  # pyright: ignore[reportGeneralTypeIssues]
        source = middle_ptr + ((cut * tokens + row) * tl.num_programs(1) + part) * RANK + line[None, :]
        middle += tl.load(source, mask=(left > 0) & (line < RANK)[None, :], other=0)
    while tl.max(left) > 0:
        slot, narrow = tl.max(left), middle.to(y_ptr.dtype.element_ty)
        lines = b_ptr + (slot - 1).to(tl.int64) * b_stride + place * RANK + line[:, None]
        b = tl.load(lines, mask=inside & (line < RANK)[:, None], other=0)
        sums = tl.where(left == slot, tl.dot(narrow, b, sums, input_precision="ieee"), sums)
        left = tl.where(left == slot, 0, left)
    tl.store(cells, sums.to(y_ptr.dtype.element_ty), mask=mine)
