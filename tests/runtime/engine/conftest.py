"""A small random Llama, the same for the engine and for whatever it is compared with."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from stoker.runtime.engine.config import ModelConfig
from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.options import EngineOptions
from stoker.runtime.engine.weights import layout, plan

TINY = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "eos_token_id": 5,
}


@dataclass(frozen=True)
class TinyModel:
    hf_config: dict[str, Any]
    config: ModelConfig
    state: dict[str, torch.Tensor]

    @classmethod
    def random(cls, seed: int = 0, **changes: Any) -> "TinyModel":
        hf_config = {**TINY, **changes}
        config = ModelConfig.from_hf(hf_config)
        generator = torch.Generator().manual_seed(seed)
        state: dict[str, torch.Tensor] = {}
        for parameter in layout(config):
            for name, rows in parameter.parts:
                noise = torch.randn(rows, *parameter.shape[1:], generator=generator)
                state[name] = 1 + 0.1 * noise if noise.dim() == 1 else 0.3 * noise
        return cls(hf_config, config, state)

    def engine(self, **options: Any) -> Engine:
        resolved = EngineOptions(**{"num_blocks": 64, "max_model_len": 96, **options}).resolve(self.config)
        weights = plan(self.config, resolved)
        for name, target in weights.targets.items():
            target.copy_(self.state[name])
        return Engine(self.config, resolved, weights, revision="tiny")


@pytest.fixture(scope="session")
def tiny() -> TinyModel:
    """Grouped-query attention, untied head."""
    return TinyModel.random()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A small model is slower on several threads, and the machine is shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
