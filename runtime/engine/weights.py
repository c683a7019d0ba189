"""A model's parameters: one flat arena, views of it for the forward pass, and the same bytes by checkpoint name."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import islice
from math import prod
from typing import NamedTuple

import torch

from stoker.runtime.engine.config import ModelConfig
from stoker.runtime.engine.options import EngineOptions

ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices are [out, in]; `qkv` stacks query, key and value rows, `gate_up` gate and up rows."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """`targets` maps each Hugging Face tensor name to its destination, a contiguous view of `arena`."""

    arena: torch.Tensor
    embed: torch.Tensor
    layers: list[LayerWeights]
    norm: torch.Tensor
    head: torch.Tensor
    targets: dict[str, torch.Tensor]


class Parameter(NamedTuple):
    """One view of the arena and the checkpoint tensors stacked in it, in order, with their numbers of rows."""

    shape: tuple[int, ...]
    parts: tuple[tuple[str, int], ...]


def plan(config: ModelConfig, options: EngineOptions) -> ModelWeights:
    """Allocates the arena on the device of the resolved `options`; views are 256-byte aligned, in execution order."""
    dtype = options.torch_dtype
    arena = torch.empty(arena_bytes(config, dtype), dtype=torch.uint8, device=options.device)
    views: list[torch.Tensor] = []
    targets: dict[str, torch.Tensor] = {}
    offset = 0
    for parameter in layout(config):
        size = prod(parameter.shape) * dtype.itemsize
        views.append(arena[offset : offset + size].view(dtype).view(parameter.shape))
        names, rows = zip(*parameter.parts, strict=True)
        targets.update(zip(names, views[-1].split(rows), strict=True))
        offset += aligned(size)
    return assemble(config, arena, iter(views), targets)


def assemble(
    config: ModelConfig, arena: torch.Tensor, views: Iterator[torch.Tensor], targets: dict[str, torch.Tensor]
) -> ModelWeights:
    """Views come in the order of `layout`, which is that of the fields of ModelWeights and LayerWeights."""
    embed = next(views)
    layers = [LayerWeights(*islice(views, len(fields(LayerWeights)))) for _ in range(config.num_layers)]
    norm = next(views)
    return ModelWeights(arena, embed, layers, norm, embed if config.tied else next(views), targets)


def layout(config: ModelConfig) -> Iterator[Parameter]:
    """Every parameter in the order in which a forward pass reads them."""
    hidden = config.hidden_size
    yield matrix(hidden, ("model.embed_tokens.weight", config.vocab_size))
    for index in range(config.num_layers):
        yield from layer_layout(config, f"model.layers.{index}.")
    yield vector(hidden, "model.norm.weight")
    if not config.tied:
        yield matrix(hidden, ("lm_head.weight", config.vocab_size))


def layer_layout(config: ModelConfig, prefix: str) -> Iterator[Parameter]:
    hidden, inner = config.hidden_size, config.intermediate_size
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    yield vector(hidden, prefix + "input_layernorm.weight")
    yield matrix(
        hidden,
        (attention + "q_proj.weight", config.query_dim),
        (attention + "k_proj.weight", config.kv_dim),
        (attention + "v_proj.weight", config.kv_dim),
    )
    yield matrix(config.query_dim, (attention + "o_proj.weight", hidden))
    yield vector(hidden, prefix + "post_attention_layernorm.weight")
    yield matrix(hidden, (mlp + "gate_proj.weight", inner), (mlp + "up_proj.weight", inner))
    yield matrix(inner, (mlp + "down_proj.weight", hidden))


def matrix(columns: int, *parts: tuple[str, int]) -> Parameter:
    return Parameter((sum(rows for _, rows in parts), columns), parts)


def vector(size: int, name: str) -> Parameter:
    return Parameter((size,), ((name, size),))


def arena_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    return sum(aligned(prod(parameter.shape) * dtype.itemsize) for parameter in layout(config))


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
