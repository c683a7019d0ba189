"""RMSNorm, alone and fused with the residual addition, in Triton: one program per row, one read and one write."""

import torch
import triton.language as tl
from torch import Tensor

from stoker.kernels.launch import await_inputs, jit, power_of_two, starts_early


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _normed(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _normed(x, residual, weight, eps), residual


def _normed(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    out, early = torch.empty(x.shape, dtype=x.dtype, device=x.device), starts_early(x.device)
    block, summed = power_of_two(x.shape[1]), x if residual is None else residual
    # Eight to sixteen values per thread: one or two 16-byte loads in flight for bfloat16.
    warps = min(16, max(1, block // 512))
    _rms_norm[(x.shape[0],)](
        x, summed, weight, out, x.stride(0), summed.stride(0), eps, x.shape[1], block, residual is not None, early,
        num_warps=warps, launch_pdl=early,
    )  # fmt: skip
    return out


@jit
def _rms_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, x_stride, residual_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0).to(tl.float32)
    await_inputs(EARLY)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0).to(tl.float32)
    if ADD:
        residual_row = residual_ptr + row * residual_stride + column
        total = x + tl.load(residual_row, mask=inside, other=0).to(tl.float32)
        total = total.to(residual_ptr.dtype.element_ty)
        tl.store(residual_row, total, mask=inside)
        x = total.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x) / WIDTH + eps) * weight
    tl.store(out_ptr + row * WIDTH + column, normed.to(out_ptr.dtype.element_ty), mask=inside)
