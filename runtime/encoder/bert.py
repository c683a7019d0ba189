"""The BERT encoder (arXiv 1810.04805) over many texts at once, their tokens side by side without padding, and the
pooling that makes one vector of each (Sentence-BERT, arXiv 1908.10084)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from stoker.coldstart.arrival import Arrival
from stoker.coldstart.manifest import Manifest
from stoker.kernels import ops
from stoker.runtime.architecture import Pooling, encoder_family, pooling_mode
from stoker.runtime.engine.config import required
from stoker.runtime.engine.options import EngineOptions
from stoker.runtime.engine.weights import Parameter, matrix, place, vector

# In checkpoints, but nothing here reads them.
UNUSED = ("pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids")


@dataclass(frozen=True, slots=True)
class BertConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_position_embeddings: int
    token_types: int
    layer_norm_eps: float
    pooling: Pooling

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], pooling: Mapping[str, Any] | None = None) -> "BertConfig":
        """`pooling` is sentence-transformers' 1_Pooling/config.json. Raises UnsupportedModel."""
        encoder_family(config)
        return cls(
            vocab_size=required(config, "vocab_size"),
            hidden_size=required(config, "hidden_size"),
            intermediate_size=required(config, "intermediate_size"),
            num_layers=required(config, "num_hidden_layers"),
            num_heads=required(config, "num_attention_heads"),
            max_position_embeddings=required(config, "max_position_embeddings"),
            token_types=required(config, "type_vocab_size"),
            layer_norm_eps=float(config.get("layer_norm_eps", 1e-12)),
            pooling=pooling_mode(pooling or {}),
        )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True)
class BertLayer:
    """Matrices are [out, in]; `qkv` stacks query, key and value rows. The norms come after the residual sums."""

    qkv: torch.Tensor
    qkv_bias: torch.Tensor
    o: torch.Tensor
    o_bias: torch.Tensor
    attention_norm: torch.Tensor
    attention_norm_bias: torch.Tensor
    up: torch.Tensor
    up_bias: torch.Tensor
    down: torch.Tensor
    down_bias: torch.Tensor
    output_norm: torch.Tensor
    output_norm_bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class BertWeights:
    """As `weights.ModelWeights`: one arena, its views, and the same bytes by checkpoint name. All of it arrives as one
    stage."""

    arena: torch.Tensor
    targets: dict[str, torch.Tensor]
    arrival: Arrival
    words: torch.Tensor
    positions: torch.Tensor
    types: torch.Tensor
    norm: torch.Tensor
    norm_bias: torch.Tensor
    layers: list[BertLayer]

    @classmethod
    def plan(
        cls, config: BertConfig, options: EngineOptions, unused: Mapping[str, int], arena: torch.Tensor | None = None
    ) -> "BertWeights":
        """Without an `arena`, allocates one on the device of the resolved `options`; `unused` tensors get room too, by
        size."""
        arena, places, targets = place(list(layout(config, unused)), options, arena)
        views = iter(places)
        words, positions, types, scale, shift = (next(views) for _ in range(5))
        layers = [BertLayer(*(next(views) for _ in fields(BertLayer))) for _ in range(config.num_layers)]
        return cls(arena, targets, Arrival(1), words, positions, types, scale, shift, layers)


def unused_sizes(manifest: Manifest) -> dict[str, int]:
    """Elements of the stored tensors that nothing reads."""
    return {entry.name: prod(entry.shape) for entry in manifest.tensors if entry.name in UNUSED}


def layout(config: BertConfig, unused: Mapping[str, int]) -> Iterator[Parameter]:
    """Every parameter in the order in which a forward pass reads them, then the `unused` ones with their sizes."""
    hidden, prefix = config.hidden_size, "embeddings."
    yield matrix(hidden, (prefix + "word_embeddings.weight", config.vocab_size))
    yield matrix(hidden, (prefix + "position_embeddings.weight", config.max_position_embeddings))
    yield matrix(hidden, (prefix + "token_type_embeddings.weight", config.token_types))
    yield from norm(hidden, prefix + "LayerNorm.")
    for index in range(config.num_layers):
        yield from layer_layout(config, f"encoder.layer.{index}.")
    for name, size in unused.items():
        yield vector((name, size))


def layer_layout(config: BertConfig, prefix: str) -> Iterator[Parameter]:
    hidden, inner, attention = config.hidden_size, config.intermediate_size, prefix + "attention."
    projections = [f"{attention}self.{part}." for part in ("query", "key", "value")]
    yield matrix(hidden, *((name + "weight", hidden) for name in projections))
    yield vector(*((name + "bias", hidden) for name in projections))
    yield from dense(hidden, hidden, attention + "output.dense.")
    yield from norm(hidden, attention + "output.LayerNorm.")
    yield from dense(hidden, inner, prefix + "intermediate.dense.")
    yield from dense(inner, hidden, prefix + "output.dense.")
    yield from norm(hidden, prefix + "output.LayerNorm.")


def dense(columns: int, rows: int, prefix: str) -> Iterator[Parameter]:
    yield matrix(columns, (prefix + "weight", rows))
    yield vector((prefix + "bias", rows))


def norm(size: int, prefix: str) -> Iterator[Parameter]:
    yield vector((prefix + "weight", size))
    yield vector((prefix + "bias", size))


def embed(config: BertConfig, weights: BertWeights, ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """ids i64[T] of texts that are `lengths` tokens long -> unit vectors float32[texts, hidden]."""
    weights.arrival.wait(0)
    device = ids.device
    counts = torch.tensor(lengths, device=device)
    start = F.pad(counts.cumsum(0), (1, 0)).int()
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    hidden = forward(config, weights, ids, positions, start)
    return F.normalize(pooled(config.pooling, hidden.float(), counts, start), dim=-1)


def forward(
    config: BertConfig, weights: BertWeights, ids: torch.Tensor, positions: torch.Tensor, start: torch.Tensor
) -> torch.Tensor:
    """ids and positions i64[T], start i32[texts + 1] -> [T, hidden]. All tokens are of type 0."""
    size, eps = (config.hidden_size,), config.layer_norm_eps
    summed = weights.words[ids] + weights.types[0] + weights.positions[positions]
    hidden = F.layer_norm(summed, size, weights.norm, weights.norm_bias, eps)
    for layer in weights.layers:
        qkv = ops.linear(hidden, layer.qkv, layer.qkv_bias)
        q, k, v = (part.unflatten(1, (config.num_heads, config.head_dim)) for part in qkv.chunk(3, dim=1))
        mixed = ops.full_attention(q, k, v, start, config.head_dim**-0.5).flatten(1)
        hidden = hidden + ops.linear(mixed, layer.o, layer.o_bias)
        hidden = F.layer_norm(hidden, size, layer.attention_norm, layer.attention_norm_bias, eps)
        inner = F.gelu(ops.linear(hidden, layer.up, layer.up_bias))
        hidden = hidden + ops.linear(inner, layer.down, layer.down_bias)
        hidden = F.layer_norm(hidden, size, layer.output_norm, layer.output_norm_bias, eps)
    return hidden


def pooled(pooling: Pooling, hidden: torch.Tensor, counts: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """hidden [T, H] -> [texts, H]. Sums in a fixed order: a text's vector doesn't depend on its neighbours."""
    if pooling == "cls":
        return hidden[start[:-1].long()]
    return torch.segment_reduce(hidden, "mean", lengths=counts, axis=0)
