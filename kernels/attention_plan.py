"""How one attention call is cut into programs: a pure function of shapes, dtype and device, never of lengths."""

from functools import cache
from typing import NamedTuple

import torch

from stoker.kernels.tuning import Tile

SPLIT_PROGRAMS_PER_PROCESSOR = 4
MAX_SEGMENTS = 64
MIN_SEGMENT_TOKENS = 128


class Plan(NamedTuple):
    """block_m rows (query tokens x grouped heads) by block_n keys per tile; segments > 1 splits the context.

    registers caps a thread's registers, so that more programs share a processor; 0 leaves them to the compiler.
    """

    block_m: int
    block_n: int
    segments: int
    peel: bool
    warps: int
    stages: int
    registers: int = 0


def plan(
    tokens: int,
    sequences: int,
    max_context: int,
    q_heads: int,
    kv_heads: int,
    dim: int,
    item_bytes: int,
    device_processors: int,
    tile: Tile | None = None,
) -> Plan:
    """The plan for `tokens` query tokens of `sequences` sequences whose block tables hold `max_context` tokens.

    As many tokens as sequences is taken for a decode step: one token each, bound by memory. Any other raggedness
    still gives right results, only slower. More tokens get taller tiles (`tile`, if one was measured for this device
    and 16-bit heads of this size), whose unmasked part runs in a loop of its own.
    """
    group = q_heads // kv_heads
    check_supported(q_heads, kv_heads, dim)
    smallest = max(16, 1 << (group - 1).bit_length())
    block_n = min(128, max(16, 128 * 128 // (dim * item_bytes)))
    if tokens == sequences:
        segments = _segments(sequences * kv_heads, max_context, device_processors)
        return Plan(smallest, min(block_n, 64), segments, peel=False, warps=4, stages=3)
    if tokens * group >= 128 * 4 * sequences and dim * item_bytes <= 256:
        if tile is not None and item_bytes == 2 and tile.block_m >= smallest:
            return Plan(tile.block_m, tile.block_n, 1, True, tile.warps, tile.stages, tile.registers)
        return Plan(max(128, smallest), block_n, 1, peel=True, warps=8, stages=3)
    return Plan(max(64, smallest), block_n, 1, peel=True, warps=4, stages=3)


def _segments(programs: int, max_context: int, device_processors: int) -> int:
    """Power of two that fills the device without cutting a full-length context below MIN_SEGMENT_TOKENS."""
    wanted = SPLIT_PROGRAMS_PER_PROCESSOR * device_processors // max(programs, 1)
    useful = min(wanted, max_context // MIN_SEGMENT_TOKENS, MAX_SEGMENTS)
    return 1 << (useful.bit_length() - 1) if useful > 1 else 1


def check_supported(q_heads: int, kv_heads: int, dim: int) -> None:
    """ValueError for head shapes that the kernels cannot run."""
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads} query heads are no multiple of {kv_heads} key-value heads")
    if dim < 16 or dim & (dim - 1):
        raise ValueError(f"head size {dim} is not a power of two of at least 16")


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of the device; off a GPU, the number an H200 has."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
