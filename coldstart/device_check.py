"""Whether the bytes on a device are the published ones: the manifest's checksums, computed where the bytes are."""

from collections.abc import Mapping, Sequence

import torch

from stoker.coldstart.chunk_plan import Piece, pieces_of
from stoker.coldstart.manifest import Manifest
from stoker.coldstart.upload import DTYPES, destinations
from stoker.coldstart.xxh3 import Part, digests, fits, host_digest


class DeviceCheck:
    """`targets` as for an Uploader, on one device; made ahead of `run`, because that is what somebody waits for.
    `converted` are the chunks that can't be compared; `unfit` those that the kernel doesn't take (shorter than 241
    bytes, or cut at other than multiples of 8), without a GPU all."""

    def __init__(self, manifest: Manifest, targets: Mapping[str, torch.Tensor]) -> None:
        stored = destinations(manifest, targets)
        raw = [target[0].view(torch.uint8) if is_raw(manifest, n, target) else None for n, target in enumerate(stored)]
        pieces = pieces_of(manifest.tensors, [chunk[:3] for chunk in manifest.chunks])
        self.converted = [n for n, part in enumerate(pieces) if any(raw[piece.tensor] is None for piece in part)]
        self._chunks = manifest.chunks
        self._device = next((target.device for target in targets.values()), torch.device("cpu"))
        self._views = {n: views_of(raw, part) for n, part in enumerate(pieces) if n not in set(self.converted)}
        inputs = {n: parts_of(views) for n, views in self._views.items()}
        self._inputs = {n: parts for n, parts in inputs.items() if self._device.type == "cuda" and fits(parts)}
        self.unfit = [n for n in self._views if n not in self._inputs]

    def run(self, unfit: bool = True) -> list[int]:
        """The numbers of the chunks whose bytes aren't the published ones: read by a GPU, on the current stream, and,
        if `unfit` ones are wanted too, copied to the host. Chunks without a checksum are passed over."""
        found = dict(zip(self._inputs, digests(list(self._inputs.values()), self._device), strict=True))
        for number in self.unfit if unfit else ():
            on_host = [view.cpu() for view in self._views[number]]
            found[number] = host_digest(parts_of(on_host))
        return sorted(n for n, digest in found.items() if self._chunks[n].checksum not in (None, digest))


def is_raw(manifest: Manifest, tensor: int, targets: Sequence[torch.Tensor]) -> bool:
    return bool(targets) and targets[0].dtype == DTYPES[manifest.tensors[tensor].dtype]


def views_of(raw: Sequence[torch.Tensor | None], pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """The bytes of a chunk's pieces, in order."""
    bytes_of = [(raw[piece.tensor], piece) for piece in pieces]
    return [b[piece.tensor_start : piece.tensor_start + piece.length] for b, piece in bytes_of if b is not None]


def parts_of(views: Sequence[torch.Tensor]) -> list[Part]:
    return [Part(view.data_ptr(), view.numel()) for view in views]
