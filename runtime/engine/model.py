"""The Llama decoder (arXiv 2302.13971) as functions over weight views, with what Mistral and Qwen add to it: sliding
windows (arXiv 2310.06825), biased projections, normed queries and keys (arXiv 2505.09388)."""

from typing import TYPE_CHECKING

import torch

from stoker.kernels import ops
from stoker.runtime.engine.config import ModelConfig
from stoker.runtime.engine.state import Batch
from stoker.runtime.engine.weights import EMBEDDING, LayerWeights, ModelWeights, layer_stage

if TYPE_CHECKING:
    from stoker.runtime.adapters.adapted import Adapted, AdaptedLayer


def forward(
    config: ModelConfig,
    weights: ModelWeights,
    cos_sin: torch.Tensor,
    kv: torch.Tensor,
    batch: Batch,
    adapted: "Adapted | None" = None,
) -> torch.Tensor:
    """Writes the step's keys and values into `kv` [N, layers, 2, 16, Hkv, D]; returns the normed hidden state of each
    sequence's last token [S, hidden]. The last layer goes on with those tokens alone once their keys are stored."""
    arrival = weights.arrival
    arrival.wait(EMBEDDING)
    arrival.wait(layer_stage(0))
    residual = ops.embed(batch.ids, weights.embed)
    hidden = ops.rms_norm(residual, weights.layers[0].input_norm, config.rms_norm_eps)
    next_norms = [layer.input_norm for layer in weights.layers[1:]]
    for index, layer in enumerate(weights.layers):
        last = batch.last if index == len(next_norms) and not batch.one_each else None
        own = adapted.layer(index) if adapted else None
        attended = attention(config, layer, config.windows[index], cos_sin, kv[:, index], batch, hidden, last, own)
        residual = residual if last is None else residual[last]
        hidden, residual = ops.add_rms_norm(attended, residual, layer.post_norm, config.rms_norm_eps)
        hidden = feed_forward(layer, hidden, own)
        # The next layer, or what follows the last one.
        arrival.wait(layer_stage(index + 1))
        if index < len(next_norms):
            hidden, residual = ops.add_rms_norm(hidden, residual, next_norms[index], config.rms_norm_eps)
    return ops.add_rms_norm(hidden, residual, weights.norm, config.rms_norm_eps)[0]


def attention(
    config: ModelConfig,
    layer: LayerWeights,
    window: int,
    cos_sin: torch.Tensor,
    kv_layer: torch.Tensor,
    batch: Batch,
    hidden: torch.Tensor,
    last: torch.Tensor | None,
    adapted: "AdaptedLayer | None",
) -> torch.Tensor:
    """One layer's attention block: [T, hidden] -> [T, hidden], or [S, hidden] for the rows `last` alone."""
    qkv = ops.linear(hidden, layer.qkv, layer.qkv_bias)
    if adapted:
        adapted.add("qkv", qkv, hidden)
    q, k, v = qkv.split((config.query_dim, config.kv_dim, config.kv_dim), dim=-1)
    heads = (config.num_heads, config.head_dim)
    kv_heads = (config.num_kv_heads, config.head_dim)
    q, k, v = q.unflatten(-1, heads), k.unflatten(-1, kv_heads), v.unflatten(-1, kv_heads)
    norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm, config.rms_norm_eps)
    q = ops.rope_store(q, k, v, cos_sin, batch.positions, kv_layer, batch.slots, norms)
    query_start = None if batch.one_each else batch.query_start
    if last is not None:
        q, query_start = q[last], None
    scale = config.head_dim**-0.5
    mixed = ops.paged_attention(q, kv_layer, batch.block_table, query_start, batch.context_len, scale, window)
    mixed = mixed.flatten(1)
    out = ops.linear(mixed, layer.o)
    if adapted:
        adapted.add("o", out, mixed)
    return out


def feed_forward(layer: LayerWeights, hidden: torch.Tensor, adapted: "AdaptedLayer | None") -> torch.Tensor:
    """[T, hidden] -> [T, hidden]."""
    if adapted is None:
        return ops.linear(ops.gated_linear(hidden, layer.gate_up), layer.down)
    gate_up = ops.linear(hidden, layer.gate_up)
    adapted.add("gate_up", gate_up, hidden)
    inner = ops.silu_mul(gate_up)
    out = ops.linear(inner, layer.down)
    adapted.add("down", out, inner)
    return out


def logits(weights: ModelWeights, hidden: torch.Tensor) -> torch.Tensor:
    """[R, hidden] -> [R, V]."""
    return ops.linear(hidden, weights.head)
