"""An adapter's file on this machine, and how its matrices get into a slot's host memory."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load

from stoker.coldstart.failures import ObjectAltered, ObjectMissing, UnsupportedModel
from stoker.coldstart.repository import ADAPTER_WEIGHTS
from stoker.runtime.adapters.peft import AdapterConfig, Sizes, check_tensors, piece_of
from stoker.runtime.adapters.slot_memory import places

DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """What was published as `revision`: the bytes of file `path` whose SHA-256 is `digest` (hex)."""

    revision: str
    path: str
    digest: str
    config: AdapterConfig

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "AdapterFile":
        config = AdapterConfig(fields["rank"], fields["scale"])
        return cls(fields["revision"], fields["path"], fields["digest"], config)


def fill(slot: torch.Tensor, file: AdapterFile, sizes: Sizes, rank: int, most: int) -> None:
    """Writes an adapter of rank up to `most`, its scale included, into the memory [slot_numbers] of a slot with room
    for `rank`. Raises a ColdStartError for bytes that aren't the published ones, or don't fit."""
    tensors = read(file)
    check_tensors(((name, dtype_of(tensor), tensor.shape) for name, tensor in tensors.items()), file.config, sizes)
    if file.config.rank > most:
        raise UnsupportedModel(
            ADAPTER_WEIGHTS, None, f"rank {file.config.rank} is above the function's adapter_rank {most}"
        )
    matrices = {piece_of(name): tensor.float() for name, tensor in tensors.items()}
    slot.zero_()
    for piece, place in places(slot, sizes, rank):
        matrix = matrices.get(piece)
        if matrix is None:
            continue
        if not matrix.isfinite().all():
            raise UnsupportedModel(ADAPTER_WEIGHTS, None, "it holds values that aren't finite")
        scale = file.config.scale if piece.half == "B" else 1.0
        place[: matrix.shape[0], : matrix.shape[1]] = matrix * scale


def read(file: AdapterFile) -> dict[str, torch.Tensor]:
    try:
        data = Path(file.path).read_bytes()
    except OSError as error:
        raise ObjectMissing(ADAPTER_WEIGHTS, None, f"this host's copy can't be read ({error.strerror})") from error
    if hashlib.sha256(data).hexdigest() != file.digest:
        raise ObjectAltered(ADAPTER_WEIGHTS, None, "its SHA-256 is not the published one")
    return load(data)


def dtype_of(tensor: torch.Tensor) -> str:
    return DTYPES.get(tensor.dtype, str(tensor.dtype))
