"""A model's parameters: one flat arena, views of it for the forward pass, and the same bytes by checkpoint name."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch

from stoker.coldstart.arrival import Arrival
from stoker.coldstart.chunk_plan import execution_rank
from stoker.runtime.engine.config import ModelConfig
from stoker.runtime.engine.options import EngineOptions

ALIGNMENT = 256
EMBEDDING = 0
"""The first stage of a model's arrival."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices are [out, in]; `qkv` stacks query, key and value rows, `gate_up` gate and up rows. None: the family has
    no such parameter."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """`targets` maps each Hugging Face tensor name to its destination, a contiguous view of `arena`. `arrival` tells
    which of them are there; it has the stages of `stage_of`."""

    arena: torch.Tensor
    embed: torch.Tensor
    layers: list[LayerWeights]
    norm: torch.Tensor
    head: torch.Tensor
    targets: dict[str, torch.Tensor]
    arrival: Arrival = field(default_factory=lambda: Arrival(0))


class Parameter(NamedTuple):
    """One view of the arena and the checkpoint tensors stacked in it, in order, with their numbers of rows."""

    shape: tuple[int, ...]
    parts: tuple[tuple[str, int], ...]


def plan(config: ModelConfig, options: EngineOptions, arena: torch.Tensor | None = None) -> ModelWeights:
    """Without an `arena` (uint8 of `arena_bytes`), allocates one on the device of the resolved `options`; views are
    256-byte aligned, in execution order."""
    arena, views, targets = place(list(layout(config)), options, arena)
    return assemble(config, arena, iter(views), targets)


def place(
    parameters: Sequence[Parameter], options: EngineOptions, arena: torch.Tensor | None = None
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """The arena, or a new one, a view of it for each parameter, and the parts of the views by checkpoint name."""
    dtype = options.torch_dtype
    if arena is None:
        arena = torch.empty(total_bytes(parameters, dtype), dtype=torch.uint8, device=options.device)
    views: list[torch.Tensor] = []
    targets: dict[str, torch.Tensor] = {}
    offset = 0
    for parameter in parameters:
        size = prod(parameter.shape) * dtype.itemsize
        views.append(arena[offset : offset + size].view(dtype).view(parameter.shape))
        names, rows = zip(*parameter.parts, strict=True)
        targets.update(zip(names, views[-1].split(rows), strict=True))
        offset += aligned(size)
    return arena, views, targets


def assemble(
    config: ModelConfig, arena: torch.Tensor, views: Iterator[torch.Tensor], targets: dict[str, torch.Tensor]
) -> ModelWeights:
    """Views come in the order of `layout`, which is that of the fields of ModelWeights and LayerWeights."""
    embed = next(views)
    absent = absent_fields(config)
    names = [field.name for field in fields(LayerWeights)]
    layers = [
        LayerWeights(**{name: None if name in absent else next(views) for name in names})  # type: ignore[arg-type]
        for _ in range(config.num_layers)
    ]
    norm = next(views)
    return ModelWeights(arena, embed, layers, norm, embed if config.tied else next(views), targets)


def absent_fields(config: ModelConfig) -> set[str]:
    return (set() if config.qkv_bias else {"qkv_bias"}) | (set() if config.qk_norm else {"q_norm", "k_norm"})


def layout(config: ModelConfig) -> Iterator[Parameter]:
    """Every parameter in the order in which a forward pass reads them."""
    hidden = config.hidden_size
    yield matrix(hidden, ("model.embed_tokens.weight", config.vocab_size))
    for index in range(config.num_layers):
        yield from layer_layout(config, f"model.layers.{index}.")
    yield vector(("model.norm.weight", hidden))
    if not config.tied:
        yield matrix(hidden, ("lm_head.weight", config.vocab_size))


def layer_layout(config: ModelConfig, prefix: str) -> Iterator[Parameter]:
    hidden, inner = config.hidden_size, config.intermediate_size
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    yield vector((prefix + "input_layernorm.weight", hidden))
    rows = (("q", config.query_dim), ("k", config.kv_dim), ("v", config.kv_dim))
    yield matrix(hidden, *((f"{attention}{part}_proj.weight", size) for part, size in rows))
    if config.qkv_bias:
        yield vector(*((f"{attention}{part}_proj.bias", size) for part, size in rows))
    if config.qk_norm:
        yield vector((attention + "q_norm.weight", config.head_dim))
        yield vector((attention + "k_norm.weight", config.head_dim))
    yield matrix(config.query_dim, (attention + "o_proj.weight", hidden))
    yield vector((prefix + "post_attention_layernorm.weight", hidden))
    yield matrix(hidden, (mlp + "gate_proj.weight", inner), (mlp + "up_proj.weight", inner))
    yield matrix(inner, (mlp + "down_proj.weight", hidden))


def matrix(columns: int, *parts: tuple[str, int]) -> Parameter:
    return Parameter((sum(rows for _, rows in parts), columns), parts)


def vector(*parts: tuple[str, int]) -> Parameter:
    return Parameter((sum(rows for _, rows in parts),), parts)


def arena_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    return total_bytes(list(layout(config)), dtype)


def total_bytes(parameters: Sequence[Parameter], dtype: torch.dtype) -> int:
    return sum(aligned(prod(parameter.shape) * dtype.itemsize) for parameter in parameters)


def layer_stage(index: int) -> int:
    """The stage of a layer; what follows the last layer (norm, head) has the next number."""
    return index + 1


def stages(config: ModelConfig) -> int:
    return layer_stage(config.num_layers) + 1


def stage_of(config: ModelConfig, name: str) -> int:
    """The stage that a checkpoint's tensor belongs to. A tied head is the embedding."""
    part, index = execution_rank(name)
    if part == 0 or (config.tied and name == "lm_head.weight"):
        return EMBEDDING
    return layer_stage(index if part == 1 else config.num_layers)


def stage_ends(config: ModelConfig, weights: ModelWeights) -> list[int]:
    """Where each stage ends in the arena, in bytes; never falling."""
    ends = [0] * stages(config)
    for name, target in weights.targets.items():
        end = target.data_ptr() - weights.arena.data_ptr() + target.nbytes
        stage = stage_of(config, name)
        ends[stage] = max(ends[stage], end)
    return list(accumulate(ends, max))


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
