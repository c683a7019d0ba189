from typing import Any

import pytest

from stoker.coldstart.failures import UnsupportedModel
from stoker.runtime.architecture import decoder_family, encoder_family
from stoker.runtime.engine.config import ModelConfig, RopeConfig

LLAMA_31 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "eos_token_id": [128001, 128008, 128009],
}


def test_llama_31() -> None:
    config = ModelConfig.from_hf(LLAMA_31)
    assert (config.head_dim, config.query_dim, config.kv_dim) == (128, 4096, 1024)
    assert config.rope == RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert not config.tied


def test_rope_parameters_replace_theta_and_scaling() -> None:
    newer = {k: v for k, v in LLAMA_31.items() if not k.startswith("rope")}
    newer["rope_parameters"] = {**LLAMA_31["rope_scaling"], "rope_theta": 500000.0}
    assert ModelConfig.from_hf(newer) == ModelConfig.from_hf(LLAMA_31)


def test_older_names_and_defaults() -> None:
    config = ModelConfig.from_hf(
        {
            **LLAMA_31,
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "num_key_value_heads": None,
            "head_dim": None,
            "eos_token_id": 2,
        }
    )
    assert (config.num_kv_heads, config.head_dim) == (32, 128)
    assert (config.rope.kind, config.rope.factor) == ("linear", 2.0)
    assert config.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, (128001, 128008, 128009)),
        ({}, (128001, 128008, 128009)),
        ({"eos_token_id": 7}, (7,)),
        ({"eos_token_id": [7, 8]}, (7, 8)),
    ],
)
def test_generation_config_decides_the_end(generation: dict[str, Any] | None, expected: tuple[int, ...]) -> None:
    assert ModelConfig.from_hf(LLAMA_31, generation).eos_token_ids == expected


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"num_key_value_heads": 5}, "num_key_value_heads 5"),
        ({"hidden_size": None}, "hidden_size must be a positive integer"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        ModelConfig.from_hf({**LLAMA_31, **change})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, (4096,) * 32),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (0,) * 32),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 4096}, (0,) * 32),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, "use_sliding_window": False}, (0,) * 32),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 7, "use_sliding_window": True},
            (0,) * 28 + (7,) * 4,
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 7,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 16,
            },
            (7, 0) * 16,
        ),
    ],
    ids=["mistral", "mistral without", "llama", "qwen off", "qwen by depth", "qwen by layer"],
)
def test_windows(change: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert ModelConfig.from_hf({**LLAMA_31, **change}).windows == expected


def test_a_window_that_holds_every_sequence_is_none() -> None:
    config = ModelConfig.from_hf({**LLAMA_31, "architectures": ["MistralForCausalLM"], "sliding_window": 4096})
    assert config.within(4097).windows == (4096,) * 32
    assert config.within(4096).windows == (0,) * 32


def test_what_the_families_add() -> None:
    qwen2 = ModelConfig.from_hf({**LLAMA_31, "architectures": ["Qwen2ForCausalLM"]})
    qwen3 = ModelConfig.from_hf({**LLAMA_31, "architectures": ["Qwen3ForCausalLM"]})
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen3.qkv_bias, qwen3.qk_norm) == (True, False, False, True)


@pytest.mark.parametrize(
    ("config", "family", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, decoder_family, "MixtralForCausalLM' is no language model"),
        ({"architectures": ["BertModel"]}, decoder_family, "supported are LlamaForCausalLM, Mistral"),
        ({"architectures": ["LlamaForCausalLM"]}, encoder_family, "LlamaForCausalLM' is no text encoder"),
        ({"architectures": ["BertModel"], "hidden_act": "relu"}, encoder_family, "hidden_act 'relu'"),
        ({"architectures": ["Qwen3ForCausalLM"], "attention_bias": True}, decoder_family, "attention_bias True"),
    ],
)
def test_a_model_of_another_kind_is_refused_by_its_architecture(
    config: dict[str, Any], family: Any, named: str
) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        family(config)
