"""RMSNorm, alone and fused with the residual addition, in Triton: one program per row, one read and one write."""

import torch
import triton.language as tl

from stoker.kernels.launch import await_inputs, jit, power_of_two, starts_early


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[1]
    block = power_of_two(width)
    early = starts_early(x.device)
    _rms_norm[(x.shape[0],)](
        x, weight, out, x.stride(0), eps, width, block, early, num_warps=_warps(block), launch_pdl=early
    )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[1]
    block = power_of_two(width)
    early = starts_early(x.device)
    _add_rms_norm[(x.shape[0],)](
        x, residual, weight, out, x.stride(0), residual.stride(0), eps, width, block, early,
        num_warps=_warps(block), launch_pdl=early,
    )  # fmt: skip
    return out, residual


def _warps(block: int) -> int:
    """Eight to sixteen values per thread: one or two 16-byte loads in flight for bfloat16."""
    return min(16, max(1, block // 512))


@jit
def _rms_norm(x_ptr, weight_ptr, out_ptr, x_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0).to(tl.float32)
    await_inputs(EARLY)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x) / WIDTH + eps) * weight
    tl.store(out_ptr + row * WIDTH + column, normed.to(out_ptr.dtype.element_ty), mask=inside)


@jit
def _add_rms_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, x_stride, residual_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0).to(tl.float32)
    await_inputs(EARLY)
    residual_row = residual_ptr + row * residual_stride + column
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0).to(tl.float32)
    residual = tl.load(residual_row, mask=inside, other=0).to(tl.float32)
    total = (x + residual).to(residual_ptr.dtype.element_ty)
    tl.store(residual_row, total, mask=inside)
    total = total.to(tl.float32)
    normed = total * tl.rsqrt(tl.sum(total * total) / WIDTH + eps) * weight
    tl.store(out_ptr + row * WIDTH + column, normed.to(out_ptr.dtype.element_ty), mask=inside)
