"""SiLU(gate) * up in Triton: the gated activation between a decoder layer's two feed-forward products."""

import torch
import triton.language as tl
from torch import Tensor

from stoker.kernels.launch import await_inputs, cdiv, jit, starts_early


def silu_mul(gate_up: Tensor, block: int = 0) -> Tensor:
    tokens, width, early = gate_up.shape[0], gate_up.shape[1] // 2, starts_early(gate_up.device)
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    # Few tokens: more programs; many tokens: more bytes in flight per program.
    block = block or (1024 if tokens <= 64 else 2048)
    _silu_mul[(cdiv(width, block), tokens)](
        gate_up, out, gate_up.stride(0), width, block, early, num_warps=4, launch_pdl=early
    )
    return out


@jit
def _silu_mul(gate_up_ptr, out_ptr, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    await_inputs(EARLY)
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    source = gate_up_ptr + row * stride + column
    gate = tl.load(source, mask=inside, other=0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=inside, other=0).to(tl.float32)
    activated = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * WIDTH + column, activated.to(out_ptr.dtype.element_ty), mask=inside)
