"""LoRA adapters (arXiv 2106.09685) as PEFT stores them: what `adapter_config.json` and the tensors beside it say, and
whether they fit a base model. Imports no torch."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

from stoker.coldstart.failures import ColdStartError, UnsupportedModel
from stoker.coldstart.repository import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from stoker.runtime.spec import MAX_RANK

TENSOR = re.compile(
    r"base_model\.model\.model\.layers\.(0|[1-9][0-9]{0,4})\.(self_attn|mlp)\.(\w+)_proj\.lora_([AB])\.weight"
)
NOT_LOADED = "its adapter can't be loaded"
"""How the error of a request begins that couldn't have its adapter."""
DTYPES = ("F32", "F16", "BF16")
# What changes the product, and the values with which it doesn't.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
}
REWRITES_BASE = ("pissa", "olora", "corda", "loftq")


class Sizes(NamedTuple):
    """Of a base model: its layers, and the widths of what goes through them."""

    layers: int
    hidden: int
    inner: int
    query: int
    kv: int

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Sizes":
        """Raises UnsupportedModel for a `config.json` without them."""
        try:
            heads, hidden = config["num_attention_heads"], config["hidden_size"]
            head = config.get("head_dim") or hidden // heads
            kv = config.get("num_key_value_heads") or heads
            return cls(config["num_hidden_layers"], hidden, config["intermediate_size"], heads * head, kv * head)
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise UnsupportedModel("config.json", None, f"its sizes are incomplete ({error!r})") from error

    def of(self, module: str) -> tuple[int, int]:
        """What goes into a projection, and what comes out of it."""
        return {
            "q": (self.hidden, self.query),
            "k": (self.hidden, self.kv),
            "v": (self.hidden, self.kv),
            "o": (self.query, self.hidden),
            "gate": (self.hidden, self.inner),
            "up": (self.hidden, self.inner),
            "down": (self.inner, self.hidden),
        }[module]


PARENT = {**dict.fromkeys("qkvo", "self_attn"), **dict.fromkeys(("gate", "up", "down"), "mlp")}


class Piece(NamedTuple):
    """Matrix A [rank, in] or B [out, rank] of one projection ("q", "down", ...) of one layer."""

    layer: int
    module: str
    half: str


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """`scale` is what B A is multiplied by before it is added to a weight."""

    rank: int
    scale: float

    @classmethod
    def read(cls, data: bytes) -> "AdapterConfig":
        """Of an `adapter_config.json`. Raises UnsupportedModel naming the field that can't be served."""
        try:
            config = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise unsupported(f"not JSON: {error}") from error
        if not isinstance(config, dict):
            raise unsupported("not a JSON object")
        check_config(config)
        rank, alpha = config.get("r"), config.get("lora_alpha")
        if type(rank) is not int or not 1 <= rank <= MAX_RANK:
            raise unsupported(f"r must be 1 to {MAX_RANK}, not {rank!r}")
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) < 1e6:
            raise unsupported(f"lora_alpha must be a number, not {alpha!r}")
        return cls(rank, alpha / (sqrt(rank) if config.get("use_rslora") else rank))


def check_config(config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise unsupported(f"peft_type must be 'LORA', not {kind!r}")
    for name, values in NEUTRAL.items():
        if config.get(name) not in values:
            raise unsupported(f"{name} {config[name]!r} can't be served; leave it out when training")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(REWRITES_BASE):
        raise unsupported(f"init_lora_weights {start!r} changes the base model: convert it to a plain LoRA first")
    targets = config.get("target_modules")
    if isinstance(targets, list):
        others = sorted({str(name) for name in targets if str(name).rpartition(".")[2] not in PROJECTIONS})
        if others:
            raise unsupported(f"target_modules {', '.join(others)} can't be served; {', '.join(PROJECTIONS)} can")


PROJECTIONS = tuple(f"{module}_proj" for module in PARENT)


def piece_of(name: str) -> Piece:
    """What a tensor is. Raises UnsupportedModel for one that belongs to no projection that can be adapted."""
    found = TENSOR.fullmatch(name)
    if not found or PARENT.get(found[3]) != found[2]:
        raise UnsupportedModel(ADAPTER_WEIGHTS, None, f"tensor {name[:200]!r} is no LoRA matrix of {known()}")
    return Piece(int(found[1]), found[3], found[4])


def known() -> str:
    return f"a layer's {', '.join(PROJECTIONS)}"


def check_tensors(
    tensors: Iterable[tuple[str, str, Sequence[int]]], config: AdapterConfig, base: Sizes | None = None
) -> None:
    """Of (name, dtype, shape) each: that A and B come in pairs of the adapter's rank, and fit the `base`. Raises
    UnsupportedModel."""
    pieces: dict[Piece, tuple[int, ...]] = {}
    for name, dtype, shape in tensors:
        piece = piece_of(name)
        pieces[piece] = tuple(shape)
        rank = shape[piece.half == "B"] if len(shape) == 2 else None
        if dtype not in DTYPES or rank != config.rank:
            raise misfit(name, shape, f"of {dtype}; it must be a matrix of rank {config.rank} of {' or '.join(DTYPES)}")
        if base:
            check_fit(name, piece, shape, base)
    if not pieces:
        raise UnsupportedModel(ADAPTER_WEIGHTS, None, "it holds no tensors")
    for piece in pieces:
        other = piece._replace(half="A" if piece.half == "B" else "B")
        if other not in pieces:
            where = f"{piece.module}_proj of layer {piece.layer}"
            raise UnsupportedModel(ADAPTER_WEIGHTS, None, f"{where} has lora_{piece.half}, but no lora_{other.half}")


def check_fit(name: str, piece: Piece, shape: Sequence[int], base: Sizes) -> None:
    if piece.layer >= base.layers:
        raise misfit(name, shape, f"is of a layer that the base model hasn't: it has {base.layers}")
    width = base.of(piece.module)[piece.half == "B"]
    if shape[piece.half == "A"] != width:
        raise misfit(name, shape, f"doesn't fit the base model, whose {piece.module}_proj needs {width} there")


def misfit(name: str, shape: Sequence[int], reason: str) -> ColdStartError:
    return UnsupportedModel(ADAPTER_WEIGHTS, None, f"tensor {name[:200]} {list(shape)} {reason}")


def unsupported(reason: str) -> UnsupportedModel:
    return UnsupportedModel(ADAPTER_CONFIG, None, reason)
