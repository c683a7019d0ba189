"""Against transformers, on random weights: every family, and every shape variant of Llama."""

from typing import TYPE_CHECKING, Any

import pytest
import torch

from stoker.runtime.engine import model
from stoker.runtime.engine.request import GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from conftest import TinyModel

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped, untied": {},
    "grouped, tied": {"tie_word_embeddings": True},
    "multi-head": {"num_key_value_heads": 4},
    "multi-query": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 16},
    "three heads each": {"hidden_size": 48, "num_attention_heads": 6},
    "one layer": {"num_hidden_layers": 1},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "mistral, short window": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 7},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2, window in the second layer": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
    "qwen3, tied": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
}


def reference(tiny: "TinyModel") -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {name: value for name, value in tiny.hf_config.items() if name != "model_type"}
    config = AutoConfig.for_model(tiny.hf_config["model_type"], **settings)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    state = dict(tiny.state)
    if tiny.config.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    theirs.load_state_dict(state)
    theirs.generation_config.pad_token_id = 0
    return theirs


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(6, 97, (1 + 4 * i,), generator=generator).tolist() for i in range(count)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_those_of_transformers(tiny: "TinyModel", variant: str) -> None:
    small = type(tiny).random(seed=2, **VARIANTS[variant])
    theirs, engine = reference(small), small.engine()
    requests = [
        GenerationRequest(str(i), prompt, SamplingParams(12, temperature=0.0)) for i, prompt in enumerate(prompts(10))
    ]
    expected = {}
    with torch.inference_mode():
        for request in requests:
            ids = torch.tensor([request.prompt])
            output = theirs.generate(ids, do_sample=False, max_new_tokens=12, attention_mask=torch.ones_like(ids))
            tokens = output[0, ids.shape[1] :].tolist()
            expected[request.id] = tokens[: tokens.index(5)] if 5 in tokens else tokens
    assert engine.generate(requests) == expected
    check_logits(small, theirs, prompts(10)[-1])


@torch.inference_mode()
def check_logits(small: "TinyModel", theirs: Any, prompt: list[int]) -> None:
    engine = small.engine()
    engine.submit(GenerationRequest("r", prompt, SamplingParams(1)))
    runner = engine.runner
    batch = runner.batch(engine.scheduler.schedule())
    hidden = model.forward(small.config, runner.weights, runner.cos_sin, runner.kv, batch)
    logits = theirs(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(model.logits(runner.weights, hidden)[0], logits, atol=2e-4, rtol=2e-4)
