"""Writes fetched chunks into the tensors of a model, converting dtypes on the destination's device."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from stoker.coldstart.arrival import Arrival
from stoker.coldstart.chunk_plan import Piece, pieces_of
from stoker.coldstart.driver import queue_copy
from stoker.coldstart.failures import ObjectTruncated, UnsupportedModel
from stoker.coldstart.manifest import ITEM_BYTES, Manifest

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

# Names that an error lists.
SHOWN = 8

StageOf = Callable[[str], int]


@dataclass(slots=True)
class Seam:
    """An element whose bytes lie in two or more chunks."""

    data: bytearray
    filled: int = 0


class Uploader:
    """`targets` maps tensor names to contiguous tensors of equal element count, any dtype, on one device; an alias may
    be a target of its own. Bytes of the target's own dtype are copied as they are, others are converted on the device.
    `stage_of` a name is the stage of `arrival` that the tensor belongs to. Not thread-safe.

    On a GPU copies are queued on `copy_stream()`: source and targets are in use until an event recorded there after
    `place` has happened. Elsewhere, and from memory that isn't pinned, `place` returns when they are done.

    Raises UnsupportedModel when the names or element counts of manifest and targets differ.
    """

    def __init__(
        self,
        manifest: Manifest,
        targets: Mapping[str, torch.Tensor],
        arrival: Arrival | None = None,
        stage_of: StageOf = lambda name: 0,
    ) -> None:
        check_names(manifest, targets)
        self._manifest = manifest
        self._targets = destinations(manifest, targets)
        self._addresses = [several[0].data_ptr() if several else 0 for several in self._targets]
        self.device = next((target.device for target in targets.values()), torch.device("cpu"))
        self._pieces = pieces_of(manifest.tensors, [chunk[:3] for chunk in manifest.chunks])
        self._missing = set(range(len(manifest.chunks)))
        self._seams: dict[tuple[int, int], Seam] = {}
        self.arrival = arrival or Arrival(1)
        self._stages = chunk_stages(manifest, self._pieces, stage_of)
        self._outstanding = Counter(stage for stages in self._stages for stage in stages)
        for stage in set(range(self.arrival.stages)) - self._outstanding.keys():
            self.arrival.issued(stage, None)

    def place(self, chunk: int, data: memoryview, pinned: bool = False) -> None:
        """`data` (writable) starts with the bytes of chunk number `chunk`, and is `pinned` when it is registered with
        CUDA. Placing a chunk again changes nothing."""
        length = self._manifest.chunks[chunk].length
        if len(data) < length:
            raise ValueError(f"chunk {chunk} has {length} bytes, {len(data)} were given")
        if chunk not in self._missing:
            return
        raw = torch.frombuffer(data, dtype=torch.uint8, count=length)
        with on_copy_stream(self.device):
            for piece in self._pieces[chunk]:
                if not (pinned and self._queue(piece, raw.data_ptr())):
                    self._place_piece(piece, raw[piece.chunk_start : piece.chunk_start + piece.length])
            self._missing.discard(chunk)
            self._count(chunk)

    def finish(self) -> None:
        """Waits for the copies. Raises ObjectTruncated, naming the first such file and range, if a chunk was never
        placed."""
        if self._missing:
            chunk = self._manifest.chunks[min(self._missing)]
            name, span = self._manifest.files[chunk.file].name, (chunk.offset, chunk.offset + chunk.length)
            raise ObjectTruncated(name, span, f"{len(self._missing)} chunk(s) never arrived, this one first")
        if event := mark(self.device):
            event.synchronize()

    def _count(self, chunk: int) -> None:
        for stage in self._stages[chunk]:
            self._outstanding[stage] -= 1
            if not self._outstanding[stage]:
                self.arrival.issued(stage, mark(self.device))

    def _queue(self, piece: Piece, address: int) -> bool:
        """The short way for bytes that are not converted."""
        if self.device.type != "cuda":
            return False
        targets = self._targets[piece.tensor]
        dtype = DTYPES[self._manifest.tensors[piece.tensor].dtype]
        if len(targets) != 1 or targets[0].dtype != dtype:
            return False
        target = self._addresses[piece.tensor] + piece.tensor_start
        return queue_copy(target, address + piece.chunk_start, piece.length, copy_stream().cuda_stream)

    def _place_piece(self, piece: Piece, raw: torch.Tensor) -> None:
        dtype = DTYPES[self._manifest.tensors[piece.tensor].dtype]
        others = []
        for target in self._targets[piece.tensor]:
            if target.dtype == dtype:
                end = piece.tensor_start + piece.length
                target.view(torch.uint8)[piece.tensor_start : end].copy_(raw, non_blocking=True)
            else:
                others.append(target)
        if others:
            self._convert(piece, raw, others)

    def _convert(self, piece: Piece, raw: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        item = ITEM_BYTES[self._manifest.tensors[piece.tensor].dtype]
        head, tail = ragged_ends(piece.tensor_start, piece.length, item)
        if head:
            self._join(piece.tensor, piece.tensor_start, raw[:head], targets)
        if head + tail < piece.length:
            whole = raw[head : piece.length - tail]
            self._write(piece.tensor, (piece.tensor_start + head) // item, whole, targets)
        if tail:
            self._join(piece.tensor, piece.tensor_start + piece.length - tail, raw[piece.length - tail :], targets)

    def _join(self, tensor: int, position: int, part: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        item = ITEM_BYTES[self._manifest.tensors[tensor].dtype]
        element, start = divmod(position, item)
        seam = self._seams.setdefault((tensor, element), Seam(bytearray(item)))
        seam.data[start : start + len(part)] = bytes(part.tolist())
        seam.filled += len(part)
        if seam.filled == item:
            del self._seams[tensor, element]
            self._write(tensor, element, torch.frombuffer(seam.data, dtype=torch.uint8), targets)

    def _write(self, tensor: int, start: int, raw: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        dtype = DTYPES[self._manifest.tensors[tensor].dtype]
        # Bytes first, conversion after: a converting copy between devices converts on the slower one.
        on_device = raw.to(self.device, non_blocking=True)
        if on_device.data_ptr() % dtype.itemsize or on_device.storage_offset() % dtype.itemsize:
            on_device = on_device.clone()
        elements = on_device.view(dtype)
        for target in targets:
            target[start : start + len(elements)].copy_(elements)


@cache
def copy_stream() -> torch.cuda.Stream:
    """The process's stream for weights, so that they arrive in the order in which they are asked for."""
    return torch.cuda.Stream()


def on_copy_stream(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.stream(copy_stream()) if device.type == "cuda" else nullcontext()


def mark(device: torch.device) -> torch.cuda.Event | None:
    """An event behind everything that was queued on the copy stream; None where copies are done at once."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(copy_stream())
    return event


def chunk_stages(manifest: Manifest, pieces: Sequence[Sequence[Piece]], stage_of: StageOf) -> list[set[int]]:
    """The stages that each chunk has bytes of."""
    names = {tensor.name: [tensor.name] for tensor in manifest.tensors}
    for alias, name in manifest.aliases.items():
        names[name].append(alias)
    stages = [{stage_of(name) for name in names[tensor.name]} for tensor in manifest.tensors]
    return [set().union(*(stages[piece.tensor] for piece in part)) for part in pieces]


def check_names(manifest: Manifest, targets: Mapping[str, torch.Tensor]) -> None:
    stored = {tensor.name for tensor in manifest.tensors}
    problems = {
        "the model lacks": targets.keys() - stored - manifest.aliases.keys(),
        "the runtime doesn't expect": stored - targets.keys(),
    }
    text = "; ".join(f"{what} {', '.join(first(names))}" for what, names in problems.items() if names)
    if text:
        raise UnsupportedModel(f"model {manifest.revision[:12]}", None, text)


def first(names: Iterable[str]) -> list[str]:
    ordered = sorted(names)
    return ordered[:SHOWN] + ([f"and {len(ordered) - SHOWN} more"] if len(ordered) > SHOWN else [])


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
