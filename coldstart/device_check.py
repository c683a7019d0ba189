"""Whether the bytes on a device are the published ones: the manifest's checksums, computed where the bytes are."""

from collections.abc import Mapping, Sequence

import torch

from stoker.coldstart.chunk_plan import Piece, pieces_of
from stoker.coldstart.manifest import Manifest
from stoker.coldstart.upload import DTYPES, destinations
from stoker.coldstart.xxh3 import Part, digests, fits, host_digest


class DeviceCheck:
    """`targets` as for an Uploader, on one device; made ahead of `run`, because that is what somebody waits for.
    `converted` are the chunks that can't be compared."""

    def __init__(self, manifest: Manifest, targets: Mapping[str, torch.Tensor]) -> None:
        stored = destinations(manifest, targets)
        raw = [target[0].view(torch.uint8) if is_raw(manifest, n, target) else None for n, target in enumerate(stored)]
        pieces = pieces_of(manifest.tensors, [chunk[:3] for chunk in manifest.chunks])
        self.converted = [n for n, part in enumerate(pieces) if any(raw[piece.tensor] is None for piece in part)]
        self._chunks = manifest.chunks
        self._views = {n: views_of(raw, part) for n, part in enumerate(pieces) if n not in set(self.converted)}

    def run(self) -> list[int]:
        """The numbers of the chunks whose bytes aren't the published ones. On a GPU they are read there, on the current
        stream; those that don't fit the kernel (shorter than 241 bytes, or cut at other than multiples of 8) are copied
        to the host. Chunks without a checksum are passed over."""
        found = found_digests(self._views)
        return [n for n in self._views if self._chunks[n].checksum not in (None, found[n])]


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
