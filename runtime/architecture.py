"""Which model families can be run, read from a Hugging Face `config.json`. Imports no torch: a deployment of any other
model is refused before a worker starts."""

from collections.abc import Mapping
from typing import Any, Literal

from stoker.coldstart.failures import UnsupportedModel

CONFIG = "config.json"
POOLING = "1_Pooling/config.json"
TEXT_LIMITS = "sentence_bert_config.json"

Pooling = Literal["mean", "cls"]

DECODERS = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ENCODERS = {"BertModel": "bert"}
ROPE_TYPES = ("default", "linear", "llama3")

COMMON: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", None),
    "mlp_bias": (False, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1.0, None),
}
NO_BIAS: Mapping[str, tuple[Any, ...]] = {"attention_bias": (False, None)}
BERT: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu",),
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "quantization_config": (None,),
}
SUPPORTED = {
    "llama": {**COMMON, **NO_BIAS},
    "mistral": {**COMMON, **NO_BIAS},
    "qwen2": COMMON,
    "qwen3": {**COMMON, **NO_BIAS},
    "bert": BERT,
}


def decoder_family(config: Mapping[str, Any]) -> str:
    """Raises UnsupportedModel, naming the architecture or field, for what `llm` functions can't serve."""
    return checked_family(config, DECODERS, "language model")


def encoder_family(config: Mapping[str, Any]) -> str:
    """The same for `embed` functions."""
    return checked_family(config, ENCODERS, "text encoder")


def checked_family(config: Mapping[str, Any], known: Mapping[str, str], what: str) -> str:
    family = family_of(config, known, what)
    for name, values in SUPPORTED[family].items():
        if config.get(name) not in values:
            raise unsupported(f"{name} {config.get(name)!r}; supported is {values[0]!r}")
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        raise unsupported(f"num_key_value_heads {kv_heads} doesn't divide num_attention_heads {heads}")
    rope_type(rope_scaling(config))
    return family


def family_of(config: Mapping[str, Any], known: Mapping[str, str], what: str) -> str:
    """`architectures` decides; a config without it is taken by its `model_type`."""
    named = config.get("architectures") or []
    if not named and config.get("model_type") in known.values():
        return config["model_type"]
    found = [known[name] for name in named if name in known]
    if len(found) != 1:
        given = (
            f"architecture {' and '.join(map(repr, named))}" if named else f"model_type {config.get('model_type')!r}"
        )
        raise unsupported(f"{given} is no {what} that can be run; supported are {', '.join(known)}")
    return found[0]


def rope_scaling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def rope_type(scaling: Mapping[str, Any]) -> str:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise unsupported(f"rope type {kind!r}; supported are {', '.join(ROPE_TYPES)}")
    return kind


def unsupported(reason: str) -> UnsupportedModel:
    return UnsupportedModel(CONFIG, None, reason)


def pooling_mode(pooling: Mapping[str, Any]) -> Pooling:
    """From sentence-transformers' 1_Pooling/config.json; without one the mean, its default."""
    asked = [name for name, chosen in pooling.items() if name.startswith("pooling_mode_") and chosen is True]
    if asked in ([], ["pooling_mode_mean_tokens"]):
        return "mean"
    if asked == ["pooling_mode_cls_token"]:
        return "cls"
    raise unsupported(f"{' and '.join(asked)}; supported are pooling_mode_mean_tokens and pooling_mode_cls_token")
