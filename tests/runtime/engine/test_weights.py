from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch

from stoker.runtime.engine.options import EngineOptions
from stoker.runtime.engine.weights import LayerWeights, ModelWeights, arena_bytes, plan

if TYPE_CHECKING:
    from conftest import TinyModel


def planned(tiny: "TinyModel", tied: bool, dtype: str) -> ModelWeights:
    config = type(tiny).random(tie_word_embeddings=tied).config
    return plan(config, EngineOptions(dtype=dtype).resolve(config))  # type: ignore[arg-type]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_targets_tile_the_arena_in_execution_order(tiny: "TinyModel", tied: bool, dtype: str) -> None:
    weights = planned(tiny, tied, dtype)
    spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in weights.targets.values()]
    assert all(end <= start for (_, end), (start, _) in pairwise(spans)), "overlapping or out of order"
    assert spans[0][0] == weights.arena.data_ptr()
    assert weights.arena.data_ptr() + weights.arena.nbytes - spans[-1][1] < 256
    assert weights.arena.nbytes == arena_bytes(tiny.config, getattr(torch, dtype)) - tied * head_bytes(weights)
    assert all(target.is_contiguous() for target in weights.targets.values())


def head_bytes(weights: ModelWeights) -> int:
    return -(-weights.head.nbytes // 256) * 256


def test_fused_matrices_are_stacks_of_their_parts(tiny: "TinyModel") -> None:
    weights = planned(tiny, tied=False, dtype="float32")
    for name, target in weights.targets.items():
        target.copy_(tiny.state[name])
    prefix = "model.layers.1."
    layer = weights.layers[1]
    qkv = [tiny.state[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkv"]
    gate_up = [tiny.state[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(layer.qkv, torch.cat(qkv))
    assert torch.equal(layer.gate_up, torch.cat(gate_up))
    assert torch.equal(layer.o, tiny.state[prefix + "self_attn.o_proj.weight"])
    assert torch.equal(layer.down, tiny.state[prefix + "mlp.down_proj.weight"])
    assert torch.equal(layer.input_norm, tiny.state[prefix + "input_layernorm.weight"])
    assert torch.equal(layer.post_norm, tiny.state[prefix + "post_attention_layernorm.weight"])
    assert torch.equal(weights.norm, tiny.state["model.norm.weight"])
    assert torch.equal(weights.head, tiny.state["lm_head.weight"])


@pytest.mark.parametrize("tied", [False, True])
def test_views_are_aligned_and_a_tied_head_is_the_embedding(tiny: "TinyModel", tied: bool) -> None:
    weights = planned(tiny, tied, "bfloat16")
    views = [weights.embed, weights.norm, weights.head]
    views += [getattr(layer, name) for layer in weights.layers for name in LayerWeights.__slots__]
    base = weights.arena.data_ptr()
    assert all((view.data_ptr() - base) % 256 == 0 for view in views if view is not None)
    assert (weights.head is weights.embed) == tied
    assert ("lm_head.weight" in weights.targets) != tied
