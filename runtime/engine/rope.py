"""Rotary position embedding tables (RoFormer, arXiv 2104.09864; frequency scaling as in the Llama 3.1 model card)."""

import math

import torch

from stoker.runtime.engine.config import RopeConfig


def cos_sin(rope: RopeConfig, head_dim: int, length: int, device: str) -> torch.Tensor:
    """float32[length, head_dim]: cosines of each position in the first half of a row, sines in the second."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies(rope, head_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


def frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """float32[head_dim / 2], radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    base = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return base / rope.factor
    return stretched(base, rope) if rope.kind == "llama3" else base


def stretched(base: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long wavelengths are slowed down by `factor`, short ones kept, those between blended."""
    turns = rope.original_max_position * base / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * base / rope.factor + kept * base
