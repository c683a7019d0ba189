"""Whether the bytes on a device are the published ones: the manifest's checksums, computed where the bytes are."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from stoker.coldstart.chunk_plan import Piece, pieces_of
from stoker.coldstart.manifest import Manifest
from stoker.coldstart.upload import DTYPES, destinations
from stoker.coldstart.xxh3 import Part, digests, fits, host_digest


class Verdict(NamedTuple):
    """Chunk numbers: those whose bytes differ, and those that can't be compared because they were converted."""

    wrong: list[int]
    converted: list[int]


def check(manifest: Manifest, targets: Mapping[str, torch.Tensor]) -> Verdict:
    """`targets` as for an Uploader, loaded, on one device. On a GPU the chunks are read there; those that don't fit the
    kernel (shorter than 241 bytes, or cut at other than multiples of 8) are copied to the host."""
    stored = destinations(manifest, targets)
    raw = [target[0].view(torch.uint8) if is_raw(manifest, n, target) else None for n, target in enumerate(stored)]
    pieces = pieces_of(manifest.tensors, [chunk[:3] for chunk in manifest.chunks])
    converted = [number for number, part in enumerate(pieces) if any(raw[piece.tensor] is None for piece in part)]
    views = {n: views_of(raw, part) for n, part in enumerate(pieces) if n not in set(converted)}
    found = found_digests(views)
    return Verdict([n for n in views if manifest.chunks[n].checksum not in (None, found[n])], converted)


def is_raw(manifest: Manifest, tensor: int, targets: Sequence[torch.Tensor]) -> bool:
    return bool(targets) and targets[0].dtype == DTYPES[manifest.tensors[tensor].dtype]


def views_of(raw: Sequence[torch.Tensor | None], pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """The bytes of a chunk's pieces, in order."""
    bytes_of = [(raw[piece.tensor], piece) for piece in pieces]
    return [b[piece.tensor_start : piece.tensor_start + piece.length] for b, piece in bytes_of if b is not None]


def found_digests(views: Mapping[int, Sequence[torch.Tensor]]) -> dict[int, int]:
    inputs = {number: parts_of(several) for number, several in views.items()}
    device = next((view.device for several in views.values() for view in several), torch.device("cpu"))
    fitting = [number for number, parts in inputs.items() if device.type == "cuda" and fits(parts)]
    found = dict(zip(fitting, digests([inputs[number] for number in fitting], device), strict=True))
    for number in inputs.keys() - found.keys():
        on_host = [view.cpu() for view in views[number]]
        found[number] = host_digest(parts_of(on_host))
    return found


def parts_of(views: Sequence[torch.Tensor]) -> list[Part]:
    return [Part(view.data_ptr(), view.numel()) for view in views]
