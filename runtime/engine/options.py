"""How one model is run: device, precision, sizes. Zeros and "auto" are resolved against the model and the device."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol

import torch

TOKEN_BUDGET = {"cpu": 512, "cuda": 8192}
AUTO: dict[str, Literal["on", "off"]] = {"cpu": "off", "cuda": "on"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Bounded(Protocol):
    """The part of a model's configuration that options depend on."""

    @property
    def max_position_embeddings(self) -> int: ...


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """`num_blocks` (usable KV blocks) or `kv_bytes` size the KV cache; both 0: from free memory. `token_budget` bounds
    the tokens of one step, `max_seqs` the sequences in it. 0 for `max_model_len` is the model's own maximum.
    `host_cache_bytes` of pinned host memory keep what the prefix cache on the device has no room for (0: none). Room
    for `adapter_slots` LoRA adapters of up to `adapter_rank` is kept beside the weights (0: requests can't name any).

    `async_scheduling` plans and starts a step before the tokens of the one before are known; "auto" does so where the
    device computes by itself (a GPU): on a CPU nothing would overlap. `cuda_graphs` replays whole steps there.

    `batch_invariant`: a request's logits, and so its tokens and log-probabilities, are the same bits whatever runs
    beside it and however its own steps are cut. Steps take longer; on a CPU every token is a step of its own.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kv_bytes: int = 0
    num_blocks: int = 0
    max_seqs: int = 64
    token_budget: int = 0
    max_model_len: int = 0
    prefix_cache: bool = True
    host_cache_bytes: int = 0
    async_scheduling: Literal["auto", "on", "off"] = "auto"
    cuda_graphs: bool = True
    adapter_slots: int = 0
    adapter_rank: int = 16
    batch_invariant: bool = False

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "EngineOptions":
        unknown = set(values) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"unknown engine option(s): {', '.join(sorted(unknown))}")
        return cls(**values)

    def resolve(self, config: Bounded) -> "EngineOptions":
        """Every default replaced by its value. Raises ValueError for what can't work."""
        check(self.device in TOKEN_BUDGET, f"device must be one of {', '.join(TOKEN_BUDGET)}, not {self.device!r}")
        check(self.dtype in ("auto", *DTYPES), f"dtype must be auto, float32 or bfloat16, not {self.dtype!r}")
        resolved = replace(
            self,
            dtype=("bfloat16" if self.device == "cuda" else "float32") if self.dtype == "auto" else self.dtype,
            token_budget=self.token_budget or max(TOKEN_BUDGET[self.device], self.max_seqs),
            max_model_len=self.max_model_len or config.max_position_embeddings,
            async_scheduling=AUTO[self.device] if self.async_scheduling == "auto" else self.async_scheduling,
            cuda_graphs=self.cuda_graphs and self.device == "cuda",
        )
        check(
            self.async_scheduling in ("auto", "on", "off"),
            f"async_scheduling must be auto, on or off, not {self.async_scheduling!r}",
        )
        check(self.max_seqs >= 1, f"max_seqs must be 1 or more, not {self.max_seqs}")
        check(
            resolved.token_budget >= self.max_seqs,
            f"token_budget {resolved.token_budget} must be at least max_seqs {self.max_seqs}: "
            "every running sequence decodes one token a step",
        )
        check(
            2 <= resolved.max_model_len <= config.max_position_embeddings,
            f"max_model_len must be 2 to {config.max_position_embeddings} (the model's), not {resolved.max_model_len}",
        )
        return resolved

    @property
    def arithmetic(self) -> str:
        """How keys and values are computed: in `batch_invariant` steps, to the very bits that this device gives."""
        name = torch.cuda.get_device_name() if self.device == "cuda" and self.batch_invariant else self.device
        return f"{self.dtype}, batch-invariant, {name}" if self.batch_invariant else self.dtype

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
