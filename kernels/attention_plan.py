"""How one attention call is cut into programs: a pure function of shapes, dtype and device, never of lengths."""

from functools import cache
from typing import NamedTuple

import torch

from stoker.kernels.tuning import Tile, Tiles

MAX_SEGMENTS = 32
# No part of a split context is shorter, but the last.
LEAST_TOKENS = 128
# Up to UNEVEN_SEGMENTS, twice as many are allowed, for contexts longer than others: parts are then at least EVEN_TOKENS
# over their number.
UNEVEN_SEGMENTS, EVEN_TOKENS = 4, 2048


class Plan(NamedTuple):
    """block_m rows (query tokens x grouped heads) by block_n keys per tile; segments > 1 splits contexts into as many
    parts at most, of `least` tiles or more.

    registers caps a thread's registers, so that more programs share a processor; 0 leaves them to the compiler.
    """

    block_m: int
    block_n: int
    segments: int
    peel: bool
    warps: int
    stages: int
    registers: int = 0
    least: int = 1


def plan(
    tokens: int,
    sequences: int,
    max_context: int,
    q_heads: int,
    kv_heads: int,
    dim: int,
    item_bytes: int,
    device_processors: int,
    tuned: Tiles | None = None,
    invariant: bool = False,
) -> Plan:
    """The plan for `tokens` query tokens of `sequences` sequences whose block tables hold `max_context` tokens.

    0 sequences stands for a decode step: one token each, bound by memory. Otherwise more tokens get taller tiles, as
    long as every processor gets one.
    `tuned` holds the tiles measured for this device and head size, in 16 bits. An `invariant` plan is the same for all
    steps, and every tile goes through the same code, whether some of its rows see a part of it only.
    """
    check_supported(q_heads, kv_heads, dim)
    group = q_heads // kv_heads
    smallest = max(16, 1 << (group - 1).bit_length())
    tiles = tuned if tuned is not None and item_bytes == 2 else default_tiles(dim, item_bytes)
    if invariant:
        return _plan(tiles.mixed, smallest, False)
    if not sequences:
        segments, least = _segments(tokens * kv_heads, max_context, tiles.split * device_processors)
        return _plan(tiles.decode, smallest, False, segments, least)
    programs = -(-tokens * group // max(tiles.prefill.block_m, smallest)) * kv_heads
    tall = tokens * group >= 128 * 4 * sequences and programs > device_processors
    return _plan(tiles.prefill if tall else tiles.mixed, smallest, True)


def _plan(tile: Tile, smallest: int, peel: bool, segments: int = 1, least_tokens: int = 0) -> Plan:
    block_m, least = max(tile.block_m, smallest), max(1, least_tokens // tile.block_n)
    return Plan(block_m, tile.block_n, segments, peel, tile.warps, tile.stages, tile.registers, least)


def default_tiles(dim: int, item_bytes: int) -> Tiles:
    block_n = min(128, max(16, 128 * 128 // (dim * item_bytes)))
    low = Tile(64, block_n, 4, 3)
    tall = Tile(128, block_n, 8, 3) if dim * item_bytes <= 256 else low
    return Tiles(Tile(16, min(block_n, 64), 4, 3), low, tall)


def _segments(programs: int, max_context: int, wanted_programs: int) -> tuple[int, int]:
    """A power of two that fills the device without cutting a full-length context below a least number of tokens."""
    filling = min(_power_of_two(wanted_programs // max(programs, 1)), MAX_SEGMENTS)
    if not filling:
        return 1, 0
    segments = 2 * filling if filling <= UNEVEN_SEGMENTS else filling
    least = max(EVEN_TOKENS // segments, LEAST_TOKENS) if filling <= UNEVEN_SEGMENTS else LEAST_TOKENS
    segments = min(segments, _power_of_two(max_context // least))
    return (segments, least) if segments > 1 else (1, 0)


def _power_of_two(n: int) -> int:
    """The largest one up to n; 0 for 0."""
    return 1 << (n.bit_length() - 1) if n else 0


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
