"""Writes fetched chunks into the tensors of a model, converting dtypes on the destination's device."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from stoker.coldstart.chunk_plan import Piece, pieces_of
from stoker.coldstart.failures import ObjectTruncated, UnsupportedModel
from stoker.coldstart.fetch import Fetcher
from stoker.coldstart.manifest import ITEM_BYTES, Manifest
from stoker.coldstart.ring import Ring
from stoker.coldstart.store import ObjectStore
from stoker.coldstart.timeline import Timeline

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}


@dataclass(slots=True)
class Seam:
    """An element whose bytes lie in two or more chunks."""

    data: bytearray
    filled: int = 0


class Uploader:
    """`targets` maps tensor names to contiguous tensors of equal element count, any dtype and device; an alias may be
    a target of its own. Not thread-safe.

    Raises UnsupportedModel when the names or element counts of manifest and targets differ.
    """

    def __init__(self, manifest: Manifest, targets: Mapping[str, torch.Tensor]) -> None:
        check_names(manifest, targets)
        self._manifest = manifest
        self._targets = destinations(manifest, targets)
        self._pieces = pieces_of(manifest.tensors, [chunk[:3] for chunk in manifest.chunks])
        self._missing = set(range(len(manifest.chunks)))
        self._seams: dict[tuple[int, int], Seam] = {}

    def place(self, chunk: int, data: memoryview) -> None:
        """`data` (writable) starts with the bytes of chunk number `chunk`; it may be reused after the return."""
        length = self._manifest.chunks[chunk].length
        if len(data) < length:
            raise ValueError(f"chunk {chunk} has {length} bytes, {len(data)} were given")
        raw = torch.frombuffer(data, dtype=torch.uint8, count=length)
        for piece in self._pieces[chunk]:
            self._place_piece(piece, raw[piece.chunk_start : piece.chunk_start + piece.length])
        self._missing.discard(chunk)

    def finish(self) -> None:
        """Raises ObjectTruncated, naming the first such file and range, if a chunk was never placed."""
        if self._missing:
            chunk = self._manifest.chunks[min(self._missing)]
            name, span = self._manifest.files[chunk.file].name, (chunk.offset, chunk.offset + chunk.length)
            raise ObjectTruncated(name, span, f"{len(self._missing)} chunk(s) never arrived, this one first")

    def _place_piece(self, piece: Piece, raw: torch.Tensor) -> None:
        item = ITEM_BYTES[self._manifest.tensors[piece.tensor].dtype]
        head, tail = ragged_ends(piece.tensor_start, piece.length, item)
        if head:
            self._join(piece.tensor, piece.tensor_start, raw[:head])
        if head + tail < piece.length:
            whole = raw[head : piece.length - tail]
            self._write(piece.tensor, (piece.tensor_start + head) // item, whole)
        if tail:
            self._join(piece.tensor, piece.tensor_start + piece.length - tail, raw[piece.length - tail :])

    def _join(self, tensor: int, position: int, part: torch.Tensor) -> None:
        item = ITEM_BYTES[self._manifest.tensors[tensor].dtype]
        element, start = divmod(position, item)
        seam = self._seams.setdefault((tensor, element), Seam(bytearray(item)))
        seam.data[start : start + len(part)] = bytes(part.tolist())
        seam.filled += len(part)
        if seam.filled == item:
            del self._seams[tensor, element]
            self._write(tensor, element, torch.frombuffer(seam.data, dtype=torch.uint8))

    def _write(self, tensor: int, start: int, raw: torch.Tensor) -> None:
        dtype = DTYPES[self._manifest.tensors[tensor].dtype]
        if raw.data_ptr() % dtype.itemsize or raw.storage_offset() % dtype.itemsize:
            raw = raw.clone()
        elements = raw.view(dtype)
        for target in self._targets[tensor]:
            # Bytes first, conversion after: a converting copy between devices converts on the slower one.
            target[start : start + len(elements)].copy_(elements.to(target.device))


def load(
    store: ObjectStore,
    manifest: Manifest,
    targets: Mapping[str, torch.Tensor],
    *,
    connections: int = 8,
    ring_slots: int = 8,
    timeline: Timeline | None = None,
) -> None:
    """Fetches the whole model into `targets` in this process. Raises a ColdStartError; the targets' content is then
    undefined. Needs `ring_slots` chunks of memory besides the targets."""
    uploader = Uploader(manifest, targets)
    ring = Ring.create(ring_slots, max((chunk.length for chunk in manifest.chunks), default=1))
    fetcher = Fetcher(store, manifest, ring, connections=connections)
    start = time.monotonic_ns()
    placing = 0
    try:
        fetcher.start()
        while (ready := fetcher.next()) is not None:
            began = time.monotonic_ns()
            uploader.place(ready.chunk, ring.slot(ready.slot))
            placing += time.monotonic_ns() - began
            fetcher.release(ready.slot)
        uploader.finish()
    finally:
        fetcher.cancel()
        ring.close()
    if timeline is not None:
        facts = fetcher.summary()
        timeline.add("fetch", start, start + int(facts["seconds"] * 1e9), **facts)
        timeline.add("upload", start, time.monotonic_ns(), bytes=facts["bytes"], busy_s=placing / 1e9)


def check_names(manifest: Manifest, targets: Mapping[str, torch.Tensor]) -> None:
    stored = {tensor.name for tensor in manifest.tensors}
    problems = {
        "the model lacks": targets.keys() - stored - manifest.aliases.keys(),
        "the runtime doesn't expect": stored - targets.keys(),
    }
    text = "; ".join(f"{what} {', '.join(first(names))}" for what, names in problems.items() if names)
    if text:
        raise UnsupportedModel(f"model {manifest.revision[:12]}", None, text)


def first(names: Iterable[str], limit: int = 8) -> list[str]:
    ordered = sorted(names)
    return ordered[:limit] + ([f"and {len(ordered) - limit} more"] if len(ordered) > limit else [])


def destinations(manifest: Manifest, targets: Mapping[str, torch.Tensor]) -> list[list[torch.Tensor]]:
    """The flat tensors that each stored tensor goes to: its own, and those of its aliases unless they share memory."""
    found = []
    for entry in manifest.tensors:
        names = [entry.name, *(alias for alias, name in manifest.aliases.items() if name == entry.name)]
        distinct = {
            targets[name].data_ptr(): flat(name, entry.shape, targets[name]) for name in names if name in targets
        }
        found.append(list(distinct.values()))
    return found


def flat(name: str, shape: tuple[int, ...], target: torch.Tensor) -> torch.Tensor:
    if target.numel() != torch.Size(shape).numel():
        reason = f"its shape is {list(shape)}, the runtime expects {list(target.shape)}"
        raise UnsupportedModel(f"tensor {name}", None, reason)
    return target.detach().view(-1)


def ragged_ends(start: int, length: int, item: int) -> tuple[int, int]:
    """How many bytes at either end of `length` bytes from `start` on belong to elements that begin or end elsewhere."""
    head = min(-start % item, length)
    return head, (length - head) % item
