"""The operations of a model step: Triton (and cuBLAS) for CUDA tensors, plain torch for the others, same signatures.

Shapes and meanings are documented in `reference`. No operation reads a device value on the host, and launch grids
depend on tensor shapes alone, so every CUDA operation can be captured in a graph and replayed with other lengths.
"""

import sys
from functools import cache
from types import ModuleType

import torch

from stoker.kernels import reference
from stoker.kernels.reference import QKNorms, embed

__all__ = ["embed"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _implementation(x).rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _implementation(x).add_rms_norm(x, residual, weight, eps)


def rope_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    kv_layer: torch.Tensor,
    slots: torch.Tensor,
    norms: QKNorms | None = None,
) -> torch.Tensor:
    return _implementation(q).rope_store(q, k, v, cos_sin, positions, kv_layer, slots, norms)


def paged_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor | None,
    context_len: torch.Tensor,
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    return _implementation(q).paged_attention(q, kv_layer, block_table, query_start, context_len, scale, window)


def full_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, query_start: torch.Tensor, scale: float
) -> torch.Tensor:
    return _implementation(q).full_attention(q, k, v, query_start, scale)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return _implementation(x).linear(x, weight, bias)


def gated_linear(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    return _implementation(x).gated_linear(x, gate_up)


def add_lora(
    y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slots: torch.Tensor, first: int
) -> None:
    _implementation(x).add_lora(y, x, a, b, slots, first)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return _implementation(gate_up).silu_mul(gate_up)


def steer(
    logits: torch.Tensor,
    seen: torch.Tensor,
    slots: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
    allowed: torch.Tensor | None,
) -> None:
    _implementation(logits).steer(logits, seen, slots, presence, frequency, repetition, allowed)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    return _implementation(logits).sample(logits, temperature, top_k, top_p, min_p, seed, position)


def late_kernels() -> int:
    """Kernels that were compiled while a request waited; none where Triton isn't used."""
    launch = sys.modules.get("stoker.kernels.launch")
    return launch.origins()["late"] if launch else 0


def _implementation(tensor: torch.Tensor) -> ModuleType:
    return _triton() if tensor.is_cuda else reference


@cache
def _triton() -> ModuleType:
    # A process without a GPU never pays for importing Triton.
    from stoker.kernels import device

    return device
