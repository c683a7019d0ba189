"""A model's architecture, read from its Hugging Face `config.json` and `generation_config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.coldstart.failures import UnsupportedModel

CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding; `kind` is "default", "linear" or "llama3", the rest of the fields as Llama 3.1 names them."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "RopeConfig":
        """Reads `rope_parameters`, or the older `rope_theta` with `rope_scaling`."""
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in ("default", "linear", "llama3"):
            raise unsupported(f"rope type {kind!r}; supported are default, linear and llama3")
        length = scaling.get("original_max_position_embeddings") or config.get("max_position_embeddings", 0)
        return cls(
            theta=float(scaling.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            kind=kind,
            factor=float(scaling.get("factor", 1.0)),
            low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
            high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
            original_max_position=int(length),
        )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-family decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tied: bool
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> "ModelConfig":
        """Raises UnsupportedModel naming the field that this engine doesn't implement. End-of-sequence ids come from
        `generation` (generation_config.json) when it has them."""
        refuse_unsupported(config)
        heads = required(config, "num_attention_heads")
        hidden = required(config, "hidden_size")
        eos = (generation or {}).get("eos_token_id")
        return cls(
            vocab_size=required(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=required(config, "intermediate_size"),
            num_layers=required(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=config.get("max_position_embeddings", 2048),
            tied=bool(config.get("tie_word_embeddings", False)),
            rope=RopeConfig.from_hf(config),
            eos_token_ids=token_ids(config.get("eos_token_id") if eos is None else eos),
        )

    @property
    def query_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    wanted = {
        "model_type": ("llama",),
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "quantization_config": (None,),
        "partial_rotary_factor": (1.0, None),
    }
    for name, supported in wanted.items():
        if config.get(name) not in supported:
            raise unsupported(f"{name} {config.get(name)!r}; supported is {supported[0]!r}")
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        raise unsupported(f"num_key_value_heads {kv_heads} doesn't divide num_attention_heads {heads}")


def required(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise unsupported(f"{name} must be a positive integer, not {value!r}")
    return value


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def unsupported(reason: str) -> UnsupportedModel:
    return UnsupportedModel(CONFIG, None, reason)
