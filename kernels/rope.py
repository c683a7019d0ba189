"""Rotary position embedding of queries and keys (normed per head before, where the model does that), fused with the
write of keys and values into the paged cache."""

import torch
import triton.language as tl
from torch import Tensor

from stoker.kernels.launch import await_inputs, cdiv, jit, power_of_two, starts_early
from stoker.kernels.reference import QKNorms


def rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    kv_layer: Tensor,
    slots: Tensor,
    norms: QKNorms | None = None,
    block: int = 0,
) -> Tensor:
    tokens, q_heads, dim = q.shape
    kv_heads, early = k.shape[1], starts_early(q.device)
    group = q_heads // kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    block = block or (1 if tokens <= 256 else 4)
    q_norm, k_norm, eps = norms or (cos_sin, cos_sin, 0.0)
    _rope_store[(cdiv(tokens, block), kv_heads)](
        q, k, v, cos_sin, positions, kv_layer, slots, out, q_norm, k_norm, eps,
        tokens, q.stride(0), k.stride(0), v.stride(0), kv_layer.stride(0), kv_layer.stride(1), kv_layer.stride(2),
        group, power_of_two(group), dim, kv_layer.shape[2], block, norms is not None, early,
        num_warps=1 if block == 1 else 4, launch_pdl=early,
    )  # fmt: skip
    return out


@jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _rope_store(
    q_ptr, k_ptr, v_ptr, cos_sin_ptr, positions_ptr, kv_ptr, slots_ptr, out_ptr, q_norm_ptr, k_norm_ptr, eps,
    tokens, q_stride, k_stride, v_stride, block_stride, value_stride, entry_stride,
    GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, DIM: tl.constexpr, CACHE_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: TOKENS tokens of one KV head and the GROUP query heads that share it."""
    await_inputs(EARLY)
    kv_head = tl.program_id(1)
    HALF: tl.constexpr = DIM // 2
    lane = tl.arange(0, HALF)[None, :]

    row = tl.arange(0, TOKENS * GROUP_BLOCK)
    token = (tl.program_id(0) * TOKENS + row // GROUP_BLOCK).to(tl.int64)
    inside = (token < tokens) & (row % GROUP_BLOCK < GROUP)
    head = kv_head * GROUP + row % GROUP_BLOCK
    rows = q_ptr + token * q_stride + head * DIM
    low, high = _rotated(rows, cos_sin_ptr, positions_ptr + token, q_norm_ptr, eps, lane, inside, DIM, NORM)
    target = out_ptr + (token * GROUP * tl.num_programs(1) + head)[:, None] * DIM + lane
    tl.store(target, low.to(out_ptr.dtype.element_ty), mask=inside[:, None])
    tl.store(target + HALF, high.to(out_ptr.dtype.element_ty), mask=inside[:, None])

    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    slot = tl.load(slots_ptr + token, mask=token < tokens, other=-1).to(tl.int64)
    kept = slot >= 0
    rows = k_ptr + token * k_stride + kv_head * DIM
    low, high = _rotated(rows, cos_sin_ptr, positions_ptr + token, k_norm_ptr, eps, lane, kept, DIM, NORM)
    entry = kv_ptr + (slot // CACHE_BLOCK) * block_stride + (slot % CACHE_BLOCK) * entry_stride + kv_head * DIM
    tl.store(entry[:, None] + lane, low.to(kv_ptr.dtype.element_ty), mask=kept[:, None])
    tl.store(entry[:, None] + lane + HALF, high.to(kv_ptr.dtype.element_ty), mask=kept[:, None])
    whole = tl.arange(0, DIM)[None, :]
    v = tl.load(v_ptr + (token * v_stride + kv_head * DIM)[:, None] + whole, mask=kept[:, None])
    tl.store(entry[:, None] + value_stride + whole, v.to(kv_ptr.dtype.element_ty), mask=kept[:, None])


@jit
def _rotated(row_ptr, cos_sin_ptr, position_ptr, norm_ptr, eps, lane, inside, DIM: tl.constexpr, NORM: tl.constexpr):
    """Both rotated halves of the rows at row_ptr, float32."""
    HALF: tl.constexpr = DIM // 2
    mask = inside[:, None]
    position = tl.load(position_ptr, mask=inside, other=0).to(tl.int64)
    table = cos_sin_ptr + position[:, None] * DIM + lane
    cos = tl.load(table, mask=mask, other=0)
    sin = tl.load(table + HALF, mask=mask, other=0)
    low = tl.load(row_ptr[:, None] + lane, mask=mask, other=0).to(tl.float32)
    high = tl.load(row_ptr[:, None] + lane + HALF, mask=mask, other=0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM + eps)[:, None]
        low = low * scale * tl.load(norm_ptr + lane).to(tl.float32)
        high = high * scale * tl.load(norm_ptr + HALF + lane).to(tl.float32)
        # Rounded as the unfused norm would be.
        low = low.to(row_ptr.dtype.element_ty).to(tl.float32)
        high = high.to(row_ptr.dtype.element_ty).to(tl.float32)
    return low * cos - high * sin, high * cos + low * sin
