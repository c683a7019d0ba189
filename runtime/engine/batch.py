"""The tensors of one step, built on the host and sent to the device in one piece."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields

import numpy as np
import torch

from stoker.runtime.engine.prefix import BLOCK_TOKENS
from stoker.runtime.engine.scheduler import Work

SEGMENT_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class HostBatch:
    """T tokens of S sequences, R of which sample. The fields are those of `Batch`, as numpy arrays."""

    ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    block_table: np.ndarray
    query_start: np.ndarray
    context_len: np.ndarray
    last: np.ndarray
    sampled: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seed: np.ndarray
    position: np.ndarray


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step computes, on the device.

    ids, positions and slots (cache slot = block * 16 + offset): i64[T]. block_table i32[S, M], query_start i32[S + 1],
    context_len i32[S]. last i64[S]: each sequence's last row of T; sampled i64[R]: which of the S sequences sample.
    temperature, top_p, min_p f32[R], top_k i32[R], seed i64[R]; position i64[R] is that of the token to be sampled.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_table: torch.Tensor
    query_start: torch.Tensor
    context_len: torch.Tensor
    last: torch.Tensor
    sampled: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor


def prepare(work: Seq[Work], device: str) -> Batch:
    return upload(host_batch(work), device)


def host_batch(work: Seq[Work]) -> HostBatch:
    starts = np.array([item.start for item in work], np.int64)
    counts = np.array([item.count for item in work], np.int64)
    query_start = np.concatenate(([0], counts.cumsum()))
    owner = np.repeat(np.arange(len(work)), counts)
    positions = np.arange(query_start[-1]) + (starts - query_start[:-1])[owner]
    table = block_table(work)
    sampling = [index for index, item in enumerate(work) if item.samples]
    params = [work[index].sequence.params for index in sampling]
    return HostBatch(
        ids=np.concatenate([item.sequence.tokens[item.start : item.start + item.count] for item in work]).astype("i8"),
        positions=positions,
        slots=table[owner, positions // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS + positions % BLOCK_TOKENS,
        block_table=table,
        query_start=query_start.astype(np.int32),
        context_len=(starts + counts).astype(np.int32),
        last=query_start[1:] - 1,
        sampled=np.array(sampling, np.int64),
        temperature=np.array([p.temperature for p in params], np.float32),
        top_k=np.array([p.top_k for p in params], np.int32),
        top_p=np.array([p.top_p for p in params], np.float32),
        min_p=np.array([p.min_p for p in params], np.float32),
        seed=np.array([p.seed for p in params], np.int64),
        position=np.array([work[index].start + work[index].count for index in sampling], np.int64),
    )


def block_table(work: Seq[Work]) -> np.ndarray:
    """i32[S, M]; rows are padded with the null block."""
    table = np.zeros((len(work), max(len(item.sequence.blocks) for item in work)), np.int32)
    for row, item in zip(table, work, strict=True):
        row[: len(item.sequence.blocks)] = item.sequence.blocks
    return table


def upload(host: HostBatch, device: str) -> Batch:
    """One copy for all arrays, asynchronous from pinned memory on a GPU."""
    arrays = {field.name: np.ascontiguousarray(getattr(host, field.name)) for field in fields(HostBatch)}
    offsets = np.cumsum([0, *(-(-a.nbytes // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT for a in arrays.values())])
    staging = torch.empty(int(offsets[-1]), dtype=torch.uint8, pin_memory=device == "cuda")
    target = staging.numpy()
    for offset, array in zip(offsets, arrays.values(), strict=False):
        target[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
    packed = staging.to(device, non_blocking=True)
    return Batch(
        **{
            name: packed[offset : offset + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
            for offset, (name, array) in zip(offsets, arrays.items(), strict=False)
        }
    )
