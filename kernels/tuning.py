"""Measured kernel configurations per GPU: data files beside this module, written by `benchmarks.kernels --tune`.

A GPU without a file takes cuBLAS for every product and the default attention tiles: slower at most, never wrong.
"""

import json
import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

# At eight rows no GPU measured so far was faster than cuBLAS.
MAX_GEMV_ROWS = 4


class Tile(NamedTuple):
    """Attention: block_m rows by block_n keys; registers caps a thread's (0 = the compiler's choice)."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int = 0


class Tiles(NamedTuple):
    """For steps of one token per sequence, of few tokens per sequence, and of whole prompts or chunks of them.

    split: how many programs per processor a decode step's contexts are split for.
    """

    decode: Tile
    mixed: Tile
    prefill: Tile
    split: int = 4


class Gemv(NamedTuple):
    """Blocks for up to `rows` rows times a weight [width, depth]; block_n 0 means that cuBLAS won."""

    rows: int
    width: int
    depth: int
    block_n: int
    block_k: int
    warps: int
    stages: int


class Tuned(NamedTuple):
    """`attention`: tiles by head size, for 16-bit caches; `gemv`: every measured shape."""

    attention: dict[int, Tiles]
    gemv: tuple[Gemv, ...]


UNTUNED = Tuned({}, ())


@cache
def gemv_for(rows: int, width: int, depth: int, measured: tuple[Gemv, ...]) -> Gemv | None:
    """The blocks measured for the nearest shape of at least as many rows, or None for cuBLAS."""

    def distance(entry: Gemv) -> float:
        return abs(math.log(entry.width / width)) + abs(math.log(entry.depth / depth))

    bucket = min((entry.rows for entry in measured if entry.rows >= rows), default=0)
    # The kernel reads eight neighbouring weights at a time.
    if not bucket or depth % 8:
        return None
    nearest = min((entry for entry in measured if entry.rows == bucket), key=distance)
    return nearest if nearest.block_n else None


@cache
def tuned(device: torch.device) -> Tuned:
    return read(path(torch.cuda.get_device_name(device))) if device.type == "cuda" else UNTUNED


def path(device_name: str) -> Path:
    """Where the table of a GPU stands: 'NVIDIA H200' -> tuned_h200.json."""
    model = device_name.removeprefix("NVIDIA ").split()[0].split("-")[0].lower()
    return Path(__file__).with_name(f"tuned_{model}.json")


def read(file: Path) -> Tuned:
    if not file.is_file():
        return UNTUNED
    data = json.loads(file.read_text())
    attention = {int(dim): _tiles(*entry) for dim, entry in data["attention"].items()}
    return Tuned(attention, tuple(Gemv(*entry) for entry in data["gemv"]))


def _tiles(decode: list[int], mixed: list[int], prefill: list[int], split: int) -> Tiles:
    return Tiles(Tile(*decode), Tile(*mixed), Tile(*prefill), split)
