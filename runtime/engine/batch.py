"""One step as the host describes it: a few numbers per sequence, new prompt tokens, and what changed in the device's
table of sequences. Packed into one array of 32-bit words, uploaded in one copy."""

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from stoker.runtime.engine.request import SamplingParams
from stoker.runtime.engine.scheduler import Work

FROM_TABLE = -1
"""Stands for a token id that only the device knows: the last one it sampled for this row."""
SEGMENT_WORDS = 4
PARAM_WORDS, ADAPTER_WORD = 8, 6


class Bucket(NamedTuple):
    """The shape of a step: room for so many sequences and tokens. Unused room comes last and is called padding."""

    sequences: int
    tokens: int


class Segment(NamedTuple):
    """Words `start` to `stop` of the upload."""

    start: int
    stop: int

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


class Layout(NamedTuple):
    """Where a bucket's arrays are: table rows and first positions i32[S], query_start i32[S + 1], token ids i32[T]."""

    rows: Segment
    starts: Segment
    query_start: Segment
    ids: Segment


class Tail(NamedTuple):
    """Table changes, behind the layout: flat cells of the block table i64[U] and their new blocks i32[U]; rows i64[N]
    with new owners and their sampling parameters i32[N, 8]."""

    cells: Segment
    blocks: Segment
    rows: Segment
    params: Segment


class Upload(NamedTuple):
    """`words` int32 are what the device gets."""

    words: np.ndarray
    tail: Tail


def layout(bucket: Bucket) -> Layout:
    sequences, tokens = bucket
    return Layout(*segments(0, sequences, sequences, sequences + 1, tokens))


def segments(start: int, *sizes: int) -> Iterator[Segment]:
    """Consecutive segments; each begins at a multiple of 16 bytes."""
    for size in sizes:
        yield Segment(start, start + size)
        start = aligned(start + size)


def aligned(words: int) -> int:
    return -(-words // SEGMENT_WORDS) * SEGMENT_WORDS


def upload_words(largest: Bucket, width: int) -> int:
    """Enough for any step within `largest`, sequences having up to `width` blocks."""
    changes = largest.sequences * (3 * width + PARAM_WORDS + 2)
    return layout(largest).ids.stop + changes + len(Tail._fields) * SEGMENT_WORDS


def pack(work: Seq[Work], bucket: Bucket, padding_row: int, width: int, buffer: np.ndarray) -> Upload:
    """Describes `work` in the words of `buffer` (int32). Sequences beyond `work` get no tokens and `padding_row`."""
    where = layout(bucket)
    rows, starts, counts = (array("i"), array("i"), array("i"))
    ids = array("i")
    for item in work:
        rows.append(item.sequence.row)
        starts.append(item.start)
        counts.append(item.count)
        add_token_ids(ids, item)
    fill(buffer[where.rows.slice], rows, padding_row)
    fill(buffer[where.starts.slice], starts, 0)
    fill(buffer[where.ids.slice], ids, 0)
    query_start = buffer[where.query_start.slice]
    query_start[0] = 0
    query_start[len(work) + 1 :] = len(ids)
    np.cumsum(counts, dtype=np.int32, out=query_start[1 : len(work) + 1])
    return pack_changes(work, width, buffer, aligned(where.ids.stop))


def fill(target: np.ndarray, values: "array[int]", rest: int) -> None:
    target[: len(values)] = values
    target[len(values) :] = rest


def add_token_ids(ids: "array[int]", item: Work) -> None:
    tokens, stop = item.sequence.tokens, item.start + item.count
    if item.count > 1:
        ids.extend(tokens[item.start : stop - 1])
    ids.append(tokens[stop - 1] if stop <= len(tokens) else FROM_TABLE)


def pack_changes(work: Seq[Work], width: int, buffer: np.ndarray, start: int) -> Upload:
    cells, blocks, rows = array("q"), array("i"), array("q")
    params: list[np.ndarray] = []
    for sequence in (item.sequence for item in work):
        if sequence.sent_blocks < 0:
            rows.append(sequence.row)
            params.append(param_words(sequence.params, sequence.adapter))
        first = max(0, sequence.sent_blocks)
        if first < len(sequence.blocks):
            cells.extend(range(sequence.row * width + first, sequence.row * width + len(sequence.blocks)))
            blocks.extend(sequence.blocks[first:])
    tail = Tail(*segments(start, 2 * len(cells), len(blocks), 2 * len(rows), PARAM_WORDS * len(rows)))
    buffer[tail.cells.slice].view(np.int64)[:] = cells
    buffer[tail.blocks.slice] = blocks
    buffer[tail.rows.slice].view(np.int64)[:] = rows
    if params:
        buffer[tail.params.slice] = np.concatenate(params)
    return Upload(buffer[: tail.params.stop], tail)


def param_words(params: SamplingParams, adapter: int) -> np.ndarray:
    """int32[8]: the bits of temperature, top_p and min_p (float32), top_k, the seed (int64), the adapter's slot, and a
    spare word."""
    words = np.zeros(PARAM_WORDS, np.int32)
    words.view(np.float32)[:3] = params.temperature, params.top_p, params.min_p
    words[3] = params.top_k
    words.view(np.int64)[2] = params.seed
    words[ADAPTER_WORD] = adapter
    return words


def mark_sent(work: Seq[Work]) -> None:
    """The device has, or will have before anything later, what `pack` described."""
    for item in work:
        item.sequence.sent_blocks = len(item.sequence.blocks)
