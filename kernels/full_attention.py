"""Attention of text encoders in Triton: every token sees all tokens of its own sequence. No cache, no padding.

A program owns BLOCK_M neighbouring tokens of one sequence and one head. Sequences share the grid as in `attention`:
sequence s owns the program indices from query_start[s] // BLOCK_M + s on, and programs with nothing to do exit.
"""

import torch
import triton.language as tl
from torch import Tensor

from stoker.kernels.attention import LOG2_E, _sequence_of
from stoker.kernels.attention_plan import check_supported
from stoker.kernels.launch import cdiv, jit

BLOCK_M = BLOCK_N = 64


def full_attention(q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, scale: float) -> Tensor:
    tokens, heads, dim = q.shape
    check_supported(heads, k.shape[1], dim)
    out, sequences = torch.empty(q.shape, dtype=q.dtype, device=q.device), query_start.numel() - 1
    _full_attention[(heads, cdiv(tokens, BLOCK_M) + sequences)](
        q, k, v, query_start, out, sequences, scale * LOG2_E, q.stride(0), k.stride(0), v.stride(0),
        dim, BLOCK_M, BLOCK_N, "tf32x3" if q.dtype == torch.float32 else "tf32", num_warps=4,
    )  # fmt: skip
    return out


@jit(do_not_specialize=["sequences"], do_not_specialize_on_alignment=["query_start_ptr"])
def _full_attention(
    q_ptr, k_ptr, v_ptr, query_start_ptr, out_ptr, sequences, scale, q_stride, k_stride, v_stride,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(1)
    sequence = _sequence_of(index, query_start_ptr, sequences, BLOCK_M)
    if sequence >= sequences:
        return
    start = tl.load(query_start_ptr + sequence)
    length = tl.load(query_start_ptr + sequence + 1) - start
    first = (index - start // BLOCK_M - sequence) * BLOCK_M
    if first >= length:
        return
    head = tl.program_id(0) * DIM
    column = tl.arange(0, DIM)[None, :]
    row = first + tl.arange(0, BLOCK_M)
    token = (start + row).to(tl.int64)[:, None]
    inside = (row < length)[:, None]
    q = tl.load(q_ptr + token * q_stride + head + column, mask=inside, other=0)
    total, mixed = _mixed(
        q, k_ptr + head, v_ptr + head, start, length, scale, k_stride, v_stride, DIM, BLOCK_M, BLOCK_N, PRECISION
    )
    target = out_ptr + token * DIM * tl.num_programs(0) + head + column
    tl.store(target, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


@jit
def _mixed(
    q, k_ptr, v_ptr, start, length, scale, k_stride, v_stride,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum of weights and weighted values over a whole sequence, by online softmax."""
    column = tl.arange(0, DIM)[None, :]
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, DIM], tl.float32)
    for base in range(0, length, BLOCK_N):
        key = base + tl.arange(0, BLOCK_N)
        inside = key < length
        token = (start + key).to(tl.int64)[:, None]
        k = tl.load(k_ptr + token * k_stride + column, mask=inside[:, None], other=0)
        v = tl.load(v_ptr + token * v_stride + column, mask=inside[:, None], other=0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = tl.where(inside[None, :], scores * scale, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * decay[:, None], input_precision=PRECISION)
        peak = new_peak
    return total, mixed
