"""The device's table of running sequences, and how a step's tensors are made from it without asking the host.

A row is a sequence's for as long as it runs. It holds the last sampled token (so that the next step can start before
the host has seen it), the sampling parameters, and the numbers of its KV blocks. The last row belongs to nobody: it is
greedy and owns null blocks only. Everything happens in the order of one stream.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np
import torch

from stoker.runtime.engine.batch import PARAM_WORDS, Bucket, Tail, Upload, layout, upload_words
from stoker.runtime.engine.prefix import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step computes: T tokens of S sequences.

    ids, positions and slots (cache slot = block * 16 + offset; -1 for padding): i64[T]. block_table i32[S, M],
    query_start i32[S + 1], context_len i32[S] (0 without tokens). last i64[S]: each sequence's last row of T. rows
    i64[S]: their rows of the table. temperature, top_p, min_p f32[S], top_k i32[S], seed i64[S]; position i64[S] is
    that of the token to be sampled.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_table: torch.Tensor
    query_start: torch.Tensor
    context_len: torch.Tensor
    last: torch.Tensor
    rows: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor

    def singles(self) -> Iterator[list["Batch"]]:
        """For each sequence, a decode step for every one of its tokens."""
        for sequence, (start, stop) in enumerate(pairwise(self.query_start.tolist())):
            yield [self._single(slice(sequence, sequence + 1), slice(at, at + 1)) for at in range(start, stop)]

    def _single(self, sequence: slice, token: slice) -> "Batch":
        places: dict[str, slice] = dict.fromkeys(("ids", "positions", "slots"), token)
        made = Batch(*(getattr(self, field.name)[places.get(field.name, sequence)] for field in fields(self)))
        ends = torch.tensor([0, 1], dtype=torch.int32)
        return replace(made, query_start=ends, last=ends[:1].long(), context_len=(made.positions + 1).int())

    @property
    def one_each(self) -> bool:
        """A decode step: row i is sequence i's only token."""
        return self.last.numel() == self.ids.numel()


class Table:
    """`rows` sequences of at most `width` blocks; steps of at most `largest`."""

    def __init__(self, rows: int, width: int, largest: Bucket, device: str) -> None:
        self.padding_row = rows
        self.width = width
        self.last_token = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.blocks = torch.zeros(rows + 1, width, dtype=torch.int32, device=device)
        self.params = torch.zeros(rows + 1, PARAM_WORDS, dtype=torch.int32, device=device)
        words = upload_words(largest, width)
        pinned = device == "cuda"
        # The copy out of one is under way while the next step is written into the other.
        self._staging = [torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(1 + pinned)]
        self.words = torch.zeros(words, dtype=torch.int32, device=device) if pinned else self._staging[0]

    def next_buffer(self) -> np.ndarray:
        """Where to write the next upload. On a GPU, the upload before the last must have ended."""
        self._staging.append(self._staging.pop(0))
        return self._staging[0].numpy()

    def receive(self, upload: Upload) -> None:
        """Queues the upload of what was written into the buffer, and the changes of the table."""
        if self.words is not self._staging[0]:
            from stoker.runtime.engine.prepare import fetch

            fetch(self.words, self._staging[0][: len(upload.words)])
        self._change(upload.tail)

    def _change(self, tail: Tail) -> None:
        if tail.cells.stop > tail.cells.start:
            cells = self.words[tail.cells.slice].view(torch.int64)
            self.blocks.view(-1).scatter_(0, cells, self.words[tail.blocks.slice])
        if tail.rows.stop > tail.rows.start:
            rows = self.words[tail.rows.slice].view(torch.int64)
            self.params.index_copy_(0, rows, self.words[tail.params.slice].view(-1, PARAM_WORDS))

    def batch(self, bucket: Bucket) -> Batch:
        """The tensors of the step that was received last. Reads nothing on the host: it can be part of a graph."""
        where = layout(bucket)
        given = [self.words[segment.slice] for segment in where]
        if not self.words.is_cuda:
            return derive(self, *given)
        from stoker.runtime.engine.prepare import derive as derive_on_gpu

        return derive_on_gpu(self, *given)

    def keep(self, batch: Batch, tokens: torch.Tensor) -> None:
        """The sampled tokens i64[S] become their rows' last ones. (-1 stands for none; it is never computed with.)"""
        self.last_token.index_copy_(0, batch.rows, tokens)


def derive(
    table: Table, rows: torch.Tensor, starts: torch.Tensor, query_start: torch.Tensor, given: torch.Tensor
) -> Batch:
    """In plain torch. The arguments are the arrays of a Layout, int32."""
    index = torch.arange(given.numel(), device=given.device)
    real = index < query_start[-1]
    owner = torch.searchsorted(query_start[1:].contiguous(), index.int(), right=True).clamp_(max=rows.numel() - 1)
    position = (starts[owner] + index - query_start[owner]).where(real, 0)
    wide = rows.long()
    block = table.blocks[wide[owner], (position // BLOCK_TOKENS).clamp(max=table.width - 1)].long()
    ids = torch.where(given < 0, table.last_token[wide[owner]].clamp(min=0), given.long())
    counts, params = query_start.diff(), table.params[wide]
    ends = starts + counts
    temperature, top_p, min_p = params[:, :3].contiguous().view(torch.float32).unbind(1)
    return Batch(
        ids=ids.where(real, 0),
        positions=position,
        slots=(block * BLOCK_TOKENS + position % BLOCK_TOKENS).where(real, -1),
        block_table=table.blocks[wide],
        query_start=query_start,
        context_len=ends.where(counts > 0, 0),
        last=(query_start[1:] - 1).clamp(min=0).long(),
        rows=wide,
        temperature=temperature.contiguous(),
        top_k=params[:, 3].contiguous(),
        top_p=top_p.contiguous(),
        min_p=min_p.contiguous(),
        seed=params[:, 4:6].contiguous().view(torch.int64).squeeze(1),
        position=ends.long(),
    )
