"""Where an adapter's matrices lie: every slot has room for those of all projections, at the same places, so that a step
finds a row's adapter by its slot alone. What an adapter leaves out is zero."""

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import torch

from stoker.runtime.adapters.peft import Piece, Sizes
from stoker.runtime.engine.config import ModelConfig
from stoker.runtime.engine.options import EngineOptions

Site = Literal["qkv", "o", "gate_up", "down"]
SITES: Mapping[Site, tuple[str, ...]] = {
    "qkv": ("q", "k", "v"),
    "o": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}
"""The engine's products, each of projections whose outputs lie side by side."""
MULTIPLE = 16


class Matrices(NamedTuple):
    """A [..., P * R, in] and B [..., out, R] of one product in one layer; its first projection has `first` outputs."""

    a: torch.Tensor
    b: torch.Tensor
    first: int


def sizes_of(config: ModelConfig) -> Sizes:
    inner = config.intermediate_size
    return Sizes(config.num_layers, config.hidden_size, inner, config.query_dim, config.kv_dim)


def padded_rank(options: EngineOptions) -> int:
    return -(-options.adapter_rank // MULTIPLE) * MULTIPLE


def shapes(sizes: Sizes, rank: int, site: Site) -> tuple[tuple[int, int], tuple[int, int]]:
    modules = SITES[site]
    depth, outputs = sizes.of(modules[0])[0], sum(sizes.of(module)[1] for module in modules)
    return (len(modules) * rank, depth), (outputs, rank)


def slot_numbers(sizes: Sizes, rank: int) -> int:
    """How many numbers a slot holds."""
    return sizes.layers * sum(a[0] * a[1] + b[0] * b[1] for a, b in (shapes(sizes, rank, site) for site in SITES))


def slots_bytes(config: ModelConfig, options: EngineOptions) -> int:
    """Of all slots together. `options` are resolved."""
    if not options.adapter_slots:
        return 0
    numbers = slot_numbers(sizes_of(config), padded_rank(options))
    return options.adapter_slots * numbers * options.torch_dtype.itemsize


def views(memory: torch.Tensor, sizes: Sizes, rank: int) -> list[dict[Site, Matrices]]:
    """By layer and site, of memory [..., slot_numbers]."""
    offset = 0

    def take(shape: tuple[int, int]) -> torch.Tensor:
        nonlocal offset
        offset += shape[0] * shape[1]
        return memory[..., offset - shape[0] * shape[1] : offset].unflatten(-1, shape)

    def matrices(site: Site) -> Matrices:
        a, b = shapes(sizes, rank, site)
        return Matrices(take(a), take(b), sizes.of(SITES[site][0])[1])

    return [{site: matrices(site) for site in SITES} for _ in range(sizes.layers)]


def places(slot: torch.Tensor, sizes: Sizes, rank: int) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Where each matrix of one slot's memory [slot_numbers] goes: A [rank, in], B [out, rank]."""
    for layer, sites in enumerate(views(slot, sizes, rank)):
        for site, (a, b, _) in sites.items():
            lines = b.split([sizes.of(module)[1] for module in SITES[site]])
            for module, own_a, own_b in zip(SITES[site], a.split(rank), lines, strict=True):
                yield Piece(layer, module, "A"), own_a
                yield Piece(layer, module, "B"), own_b
