"""A model's architecture, read from its Hugging Face `config.json` and `generation_config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from stoker.runtime.architecture import decoder_family, rope_scaling, rope_type, unsupported

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
        scaling = rope_scaling(config)
        length = scaling.get("original_max_position_embeddings") or config.get("max_position_embeddings", 0)
        return cls(
            theta=float(scaling.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            kind=rope_type(scaling),
            factor=float(scaling.get("factor", 1.0)),
            low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
            high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
            original_max_position=int(length),
        )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama shape. `windows`: how many tokens each layer attends to, its own included (0: all).
    `qkv_bias` is Qwen2's; `qk_norm` is Qwen3's: queries and keys are normed per head."""

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
    windows: tuple[int, ...]
    qkv_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> "ModelConfig":
        """Raises UnsupportedModel naming the field that this engine doesn't implement. End-of-sequence ids come from
        `generation` (generation_config.json) when it has them."""
        family = decoder_family(config)
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
            windows=layer_windows(config, family),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
        )

    def within(self, length: int) -> "ModelConfig":
        """For sequences of at most `length` tokens: windows that hold all of them are none."""
        return replace(self, windows=tuple(window if window < length else 0 for window in self.windows))

    @property
    def query_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim


def layer_windows(config: Mapping[str, Any], family: str) -> tuple[int, ...]:
    """Mistral's window holds for every layer, Qwen's for those that `layer_types` or `max_window_layers` names."""
    layers, window = required(config, "num_hidden_layers"), config.get("sliding_window") or 0
    if family == "mistral":
        return (window,) * layers
    if family == "llama" or not config.get("use_sliding_window"):
        return (0,) * layers
    first = config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or [
        "sliding_attention" if i >= first else "full_attention" for i in range(layers)
    ]
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def required(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise unsupported(f"{name} must be a positive integer, not {value!r}")
    return value


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
