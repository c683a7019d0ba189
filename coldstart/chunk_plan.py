"""Cuts tensor data into chunks on a grid, and orders them as a forward pass will want them."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from stoker.coldstart.manifest import CHUNK_BYTES, TensorEntry, merged

LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks)\.(\d+)\.")


class Span(NamedTuple):
    """`length` bytes of a file from absolute `offset` on."""

    file: int
    offset: int
    length: int


class Piece(NamedTuple):
    """The part of tensor number `tensor` that lies in a chunk: byte positions in the chunk and in the tensor."""

    tensor: int
    chunk_start: int
    tensor_start: int
    length: int


def plan_chunks(tensors: Sequence[TensorEntry], chunk_bytes: int = CHUNK_BYTES) -> list[Span]:
    """Covers every tensor byte once, in load order. Cuts fall on multiples of `chunk_bytes` within the file, so that
    all but the first chunk of a file start on a page boundary."""
    spans = []
    for file in sorted({tensor.file for tensor in tensors}):
        runs = merged((tensor.offset, tensor.length) for tensor in tensors if tensor.file == file)
        spans += [span for start, end in runs for span in cut(file, start, end, chunk_bytes)]
    ranks = [
        min((execution_rank(tensors[piece.tensor].name) for piece in pieces), default=(0, 0))
        for pieces in pieces_of(tensors, spans)
    ]
    return [span for _, span in sorted(zip(ranks, spans, strict=True))]


def cut(file: int, start: int, end: int, chunk_bytes: int) -> Iterable[Span]:
    while start < end:
        stop = min(end, (start // chunk_bytes + 1) * chunk_bytes)
        yield Span(file, start, stop - start)
        start = stop


def execution_rank(name: str) -> tuple[int, int]:
    """Embeddings, then the layers by number, then what follows them."""
    layer = LAYER.search(name)
    if layer:
        return (1, int(layer[1]))
    return (0, 0) if "embed" in name or "wte" in name or "wpe" in name else (2, 0)


def pieces_of(tensors: Sequence[TensorEntry], spans: Iterable[tuple[int, int, int]]) -> list[list[Piece]]:
    """For each `(file, offset, length)` span the tensor parts in it, in file order."""
    order = sorted((i for i, t in enumerate(tensors) if t.length), key=lambda i: (tensors[i].file, tensors[i].offset))
    starts = [(tensors[i].file, tensors[i].offset) for i in order]
    return [span_pieces(tensors, order, starts, *span) for span in spans]


def span_pieces(
    tensors: Sequence[TensorEntry],
    order: Sequence[int],
    starts: Sequence[tuple[int, int]],
    file: int,
    offset: int,
    length: int,
) -> list[Piece]:
    pieces = []
    end = offset + length
    for position in range(max(0, bisect_right(starts, (file, offset)) - 1), len(order)):
        tensor = tensors[order[position]]
        if (tensor.file, tensor.offset) >= (file, end):
            break
        first, last = max(offset, tensor.offset), min(end, tensor.offset + tensor.length)
        if tensor.file == file and first < last:
            pieces.append(Piece(order[position], first - offset, first - tensor.offset, last - first))
    return pieces
