"""Causal grouped-query attention over a paged cache in Triton: prefill, decode and mixed steps in one kernel.

A program owns one KV head and BLOCK_Q neighbouring tokens of one sequence; the query heads that share the KV head are
packed with the tokens into BLOCK_M rows, so the matrix units are used at decode too. The grid is bounded by shapes:
sequence s owns the program indices from query_start[s] // BLOCK_Q + s on, and programs with nothing to do exit. In a
decode step program s owns sequence s; only there contexts are split, and only those longer than a share.
Online softmax as in FlashAttention-2 (Dao, 2023, arXiv 2307.08691); the packing and the bounded grid follow "The
Anatomy of a Triton Attention Kernel" (2025, arXiv 2511.11581); the split over the context is Flash-Decoding's.
"""

from collections.abc import Callable

import torch
import triton.language as tl
from torch import Tensor

from stoker.kernels.attention_plan import Plan, plan, processors
from stoker.kernels.launch import await_inputs, cdiv, jit, starts_early
from stoker.kernels.tuning import tuned

LOG2_E = 1.4426950408889634


def paged_attention(
    q: Tensor,
    kv_layer: Tensor,
    block_table: Tensor,
    query_start: Tensor | None,
    context_len: Tensor,
    scale: float,
    window: int = 0,
    choose: Callable[..., Plan] = plan,
) -> Tensor:
    (tokens, q_heads, dim), (sequences, width) = q.shape, block_table.shape
    _, _, cache_block, kv_heads, _ = kv_layer.shape
    tiles, longest, early = tuned(q.device).attention.get(dim), width * cache_block, starts_early(q.device)
    chosen = choose(tokens, 0 if query_start is None else sequences, min(window or longest, longest), q_heads, kv_heads,
                    dim, q.element_size(), processors(q.device), tiles)  # fmt: skip
    group, segments = q_heads // kv_heads, chosen.segments
    block_q = chosen.block_m // group
    programs = sequences if query_start is None else cdiv(tokens, block_q) + sequences
    out = partial = peak = total = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if segments > 1:
        partial = torch.empty((tokens, q_heads, segments, dim), dtype=torch.float32, device=q.device)
        peak, total = torch.empty((2, tokens, q_heads, segments), dtype=torch.float32, device=q.device)
    _attend[(kv_heads, programs, segments)](
        q, kv_layer, block_table, context_len if query_start is None else query_start, context_len,
        out, partial, peak, total,
        tokens, sequences, scale * LOG2_E, q.stride(0), block_table.stride(0), *kv_layer.stride()[:3],
        group, dim, cache_block, chosen.block_m, block_q, chosen.block_n,
        query_start is None, segments > 1, chosen.least, chosen.peel, window,
        "tf32x3" if q.dtype == torch.float32 else "tf32", early,
        num_warps=chosen.warps, num_stages=chosen.stages, maxnreg=chosen.registers or None, launch_pdl=early,
    )  # fmt: skip
    if segments > 1:
        _merge[(q_heads, tokens)](
            partial, peak, total, context_len, out,
            segments, chosen.least, chosen.block_n, window, dim, early, num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return out


@jit(
    do_not_specialize=["tokens", "sequences", "table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "query_start_ptr", "context_ptr"],
)
def _attend(
    q_ptr, kv_ptr, table_ptr, query_start_ptr, context_ptr, out_ptr, partial_ptr, peak_ptr, total_ptr,
    tokens, sequences, scale, q_stride, table_stride, block_stride, value_stride, entry_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, CACHE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
    DECODE: tl.constexpr, SPLIT: tl.constexpr, LEAST: tl.constexpr, PEEL: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    # The last programs have the longest causal rows: start them first.
    index = tl.num_programs(1) - 1 - tl.program_id(1)
    if DECODE:
        sequence, start, length, context, first = index, index, 1, tl.load(context_ptr + index), 0
    else:
        sequence, start, length, context, first = _owned(
            index, query_start_ptr, context_ptr, tokens, sequences, BLOCK_Q
        )
    visible = context - length + tl.minimum(first + BLOCK_Q, length)
    begin, whole, plain, end = _tile_range(context - length + first + 1, visible, BLOCK_N, PEEL, WINDOW)
    parts = 1
    if SPLIT:
        parts, share = _parts(end - begin, tl.num_programs(2), LEAST)
        begin += tl.program_id(2) * share
        whole, plain, end = begin, begin, tl.minimum(begin + share, end)
    if (first >= length) | (tl.program_id(2) >= parts):
        return
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, DIM)[None, :]
    local = first + row // GROUP
    valid = (row < BLOCK_Q * GROUP) & (local < length)
    token = (start + local).to(tl.int64)
    head = tl.program_id(0) * GROUP + row % GROUP
    q = tl.load(q_ptr + (token * q_stride + head * DIM)[:, None] + column, mask=valid[:, None], other=0)
    keys, table = kv_ptr + tl.program_id(0) * DIM, table_ptr + sequence.to(tl.int64) * table_stride
    cache = (keys, table, context, block_stride, value_stride, entry_stride)
    peak, total, mixed = _attended(
        q, cache, begin, whole, plain, end, context - length + local, scale, DIM, CACHE_BLOCK, BLOCK_M, BLOCK_N, PEEL,
        WINDOW, PRECISION,
    )  # fmt: skip
    cell = token * GROUP * tl.num_programs(0) + head
    _store(out_ptr, partial_ptr, peak_ptr, total_ptr, cell, valid, parts, peak, total, mixed, DIM)


@jit
def _store(out_ptr, partial_ptr, peak_ptr, total_ptr, cell, valid, parts, peak, total, mixed, DIM: tl.constexpr):
    column = tl.arange(0, DIM)[None, :]
    if parts == 1:
        mixed = mixed / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(out_ptr + cell[:, None] * DIM + column, mixed.to(out_ptr.dtype.element_ty), mask=valid[:, None])
    else:
        cell = cell * tl.num_programs(2) + tl.program_id(2)
        tl.store(peak_ptr + cell, peak, mask=valid)
        tl.store(total_ptr + cell, total, mask=valid)
        tl.store(partial_ptr + cell[:, None] * DIM + column, mixed, mask=valid[:, None])


@jit
def _owned(index, query_start_ptr, context_ptr, tokens, sequences, BLOCK_Q: tl.constexpr):
    """Program `index`'s sequence, that one's first row, new tokens and context, and the first new token to work on."""
    sequence = _sequence_of(index, query_start_ptr, sequences, BLOCK_Q)
    # Rows behind the last sequence act as one more sequence, without context, so that they come out as zeros.
    start = tl.load(query_start_ptr + sequence)
    stop = tl.load(query_start_ptr + sequence + 1, mask=sequence < sequences, other=tokens)
    context = tl.load(context_ptr + sequence, mask=sequence < sequences, other=0)
    return sequence, start, stop - start, context, (index - start // BLOCK_Q - sequence) * BLOCK_Q


@jit
def _sequence_of(index, query_start_ptr, sequences, BLOCK_Q: tl.constexpr):
    """How many sequences start after the first and at or before program `index`: the one that owns it.

    Counting over wide loads instead of bisecting: one memory latency per 256 sequences.
    """
    owner = 0
    for base in range(1, sequences + 1, 256):
        sequence = base + tl.arange(0, 256)
        start = tl.load(query_start_ptr + sequence, mask=sequence <= sequences, other=0)
        begun = (sequence <= sequences) & (start // BLOCK_Q + sequence <= index)
        owner += tl.sum(begun.to(tl.int32))
    return owner


@jit
def _parts(tiles, segments, LEAST: tl.constexpr):
    """Into how many parts of how many tiles a context is split: none of less than LEAST tiles but the last."""
    share = tl.maximum(tl.cdiv(tiles, segments), LEAST)
    return tl.maximum(tl.cdiv(tiles, share), 1), share


@jit
def _tile_range(unmasked, visible, BLOCK_N: tl.constexpr, PEEL: tl.constexpr, WINDOW: tl.constexpr):
    """The rows' key tiles [begin, end); all rows see all of those in [whole, plain), others only in part."""
    begin = 0
    if WINDOW:
        begin = tl.maximum(unmasked - WINDOW, 0) // BLOCK_N
    end = tl.cdiv(visible, BLOCK_N)
    whole = begin
    plain = begin
    if PEEL:
        if WINDOW:
            whole = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(visible - WINDOW, 0), BLOCK_N), begin), end)
        plain = tl.maximum(tl.minimum(unmasked // BLOCK_N, end), whole)
    return begin, whole, plain, end


@jit
def _attended(
    q, cache, begin, whole, plain, end, position, scale, DIM: tl.constexpr, CACHE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PEEL: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Peak score, sum of weights and weighted values [BLOCK_M, DIM] over the key tiles [begin, end)."""
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    state = (peak, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, DIM], tl.float32))
    if PEEL:
        if WINDOW:
            for tile in range(begin, whole):
                state = _tile(
                    state, q, cache, tile, position, scale, DIM, CACHE_BLOCK, BLOCK_N, True, WINDOW, PRECISION
                )
        for tile in range(whole, plain):
            state = _tile(state, q, cache, tile, position, scale, DIM, CACHE_BLOCK, BLOCK_N, False, 0, PRECISION)
    for tile in range(plain, end):
        state = _tile(state, q, cache, tile, position, scale, DIM, CACHE_BLOCK, BLOCK_N, True, WINDOW, PRECISION)
    return state


@jit
def _tile(
    state, q, cache, tile, position, scale, DIM: tl.constexpr, CACHE_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online-softmax step over BLOCK_N cached tokens. Nothing past the context is read: it may hold anything."""
    tl.static_assert(BLOCK_N % CACHE_BLOCK == 0, "a tile starts at a cache block")
    peak, total, mixed = state
    keys, table, context, block_stride, value_stride, entry_stride = cache
    row = tl.arange(0, BLOCK_N)
    key = tile * BLOCK_N + row
    cached = key < context if MASKED else row < BLOCK_N
    block = tl.load(table + key // CACHE_BLOCK, mask=cached, other=0).to(tl.int64) * block_stride
    within = (row % CACHE_BLOCK * entry_stride)[:, None] + tl.arange(0, DIM)[None, :]
    # How these sums are grouped, and the block's index taken, decides how many registers a decode step needs, and so
    # how many of its programs share a processor.
    entry = keys + block[:, None] + within
    if MASKED:
        k = tl.load(entry, mask=cached[:, None], other=0)
        v = tl.load(entry + value_stride, mask=cached[:, None], other=0)
    else:
        k = tl.load(entry)
        v = tl.load(entry + value_stride)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        seen = key[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    # A row that has seen nothing yet has peak -inf; any finite stand-in keeps -inf - -inf out of the exponent.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
    weights = tl.exp2(scores * scale - base[:, None])
    decay = tl.exp2(peak - base)
    total = total * decay + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * decay[:, None], input_precision=PRECISION)
    return new_peak, total, mixed


@jit(do_not_specialize_on_alignment=["context_ptr"])
def _merge(
    partial_ptr, peak_ptr, total_ptr, context_ptr, out_ptr,
    SEGMENTS: tl.constexpr, LEAST: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, DIM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program per sequence and query head: the parts' results, rescaled to their common peak."""
    await_inputs(EARLY)
    context = tl.load(context_ptr + tl.program_id(1))
    begin, _, _, end = _tile_range(context, context, BLOCK_N, False, WINDOW)
    parts, _ = _parts(end - begin, SEGMENTS, LEAST)
    if parts == 1:
        return
    cell = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    segment = tl.arange(0, SEGMENTS)
    column = tl.arange(0, DIM)
    stored = segment < parts
    peak = tl.load(peak_ptr + cell * SEGMENTS + segment, mask=stored, other=float("-inf"))
    total = tl.load(total_ptr + cell * SEGMENTS + segment, mask=stored, other=0)
    rows = (cell * SEGMENTS + segment)[:, None] * DIM + column[None, :]
    partial = tl.load(partial_ptr + rows, mask=stored[:, None], other=0)
    weight = tl.exp2(peak - tl.max(peak, 0))
    mixed = tl.sum(partial * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out_ptr + cell * DIM + column, mixed.to(out_ptr.dtype.element_ty))
