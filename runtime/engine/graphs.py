"""Whole steps as CUDA graphs: one per bucket, captured when the engine can afford it, replayed ever after.

A step is padded to the smallest bucket that holds it. Padding has no tokens, or tokens with slot -1 and no context: it
reads no cache and writes none. All graphs share one memory pool: they run one after the other, and nothing in the pool
outlives a step but the sampled tokens, which are copied out before the next one starts.
"""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

from stoker.runtime.engine.batch import Bucket
from stoker.runtime.engine.config import ModelConfig
from stoker.runtime.engine.options import EngineOptions

log = logging.getLogger(__name__)

DECODE_SIZES = (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(320, 513, 64))
MIXED_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
ALWAYS_MIXED_TOKENS = 2048
HIDING_FLOPS = 1e13
"""A step with more arithmetic (15 to 25 ms of it) takes longer than its launches one by one, and needs no graph."""
FEW_SEQUENCES = 8
"""Mixed steps have a bucket for few sequences too: fewer rows go through the head, and attention takes larger tiles."""
DRIVER_BYTES_PER_LAYER = 128 << 10
"""What the driver keeps for one layer's launches in one graph (about ten kernels): four times what was seen."""
POOL_BYTES = 128 << 20
"""cuBLAS's workspace for the capturing stream, and what the allocator rounds up."""


class Computed(NamedTuple):
    """What a step leaves on the device until the next one: sampled tokens i64[S], and logits [S, V]."""

    tokens: torch.Tensor
    logits: torch.Tensor


Compute = Callable[[Bucket], Computed]


def buckets(config: ModelConfig, options: EngineOptions) -> list[Bucket]:
    """Smallest first; decode steps (one token per sequence), then mixed ones. `options` are resolved."""
    decode = sorted({min(size, options.max_seqs) for size in DECODE_SIZES})
    mixed = {
        Bucket(min(sequences, options.max_seqs), tokens)
        for tokens in MIXED_TOKENS
        if tokens <= ALWAYS_MIXED_TOKENS or tokens * flops_per_token(config) < HIDING_FLOPS
        for sequences in (FEW_SEQUENCES, tokens - 1)
        if tokens <= options.token_budget
    }
    return [Bucket(size, size) for size in decode] + sorted(mixed, key=lambda bucket: (bucket.tokens, bucket))


def flops_per_token(config: ModelConfig) -> float:
    """Of the layers' products."""
    attention = 2 * config.query_dim + 2 * config.kv_dim
    return 2.0 * config.num_layers * config.hidden_size * (attention + 3 * config.intermediate_size)


def fitting(choices: list[Bucket], sequences: int, tokens: int) -> Bucket | None:
    """The smallest bucket for a step. Decode and mixed steps are never exchanged: attention is cut differently."""
    decodes = sequences == tokens
    for bucket in choices:
        is_decode = bucket.sequences == bucket.tokens
        if is_decode == decodes and bucket.sequences >= sequences and bucket.tokens >= tokens:
            return bucket
    return None


class Graphs:
    """At most about `budget` bytes are used. `options` are resolved."""

    def __init__(self, config: ModelConfig, options: EngineOptions, budget: int) -> None:
        self.choices = buckets(config, options) if options.device == "cuda" else []
        self.bytes = 0
        self.replays = 0
        self._missing = self.choices[::-1] if options.cuda_graphs else []
        self._driver_bytes = config.num_layers * DRIVER_BYTES_PER_LAYER
        self._budget = budget
        self._captured: dict[Bucket, tuple[torch.cuda.CUDAGraph, Computed]] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._captured)

    def replay(self, bucket: Bucket) -> Computed | None:
        """What is computed is valid until the next replay; None when there is no graph for this bucket."""
        if found := self._captured.get(bucket):
            graph, computed = found
            graph.replay()
            self.replays += 1
            return computed
        return None

    def next_missing(self) -> Bucket | None:
        """The largest bucket without a graph, so that the ones after it find room in its memory."""
        return self._missing[0] if self._missing and self.bytes < self._budget else None

    def capture(self, bucket: Bucket, compute: Compute) -> None:
        """`compute` makes the tokens and logits from what the device was sent. It must have run eagerly for this bucket
        before, so that every kernel is loaded."""
        if bucket not in self._missing or self.bytes >= self._budget:
            return
        self._missing.remove(bucket)
        before = torch.cuda.memory_reserved()
        try:
            self._captured[bucket] = self._record(bucket, compute)
        except Exception:
            # Steps go on one launch at a time. (Should the device be broken, the next one says so.)
            log.exception("no more graphs: capturing %d sequences and %d tokens failed", *bucket)
            self._missing = []
        self.bytes += torch.cuda.memory_reserved() - before + self._driver_bytes

    def _record(self, bucket: Bucket, compute: Compute) -> tuple[torch.cuda.CUDAGraph, Computed]:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph, main, side = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), capture_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side), uncollected():
            # Not torch.cuda.graph(): it waits for the device and collects garbage, while a step is in flight here.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                tokens, logits = compute(bucket)
            finally:
                graph.capture_end()
        main.wait_stream(side)
        # The next capture may use their memory again: logits outlive their step only until another one is replayed.
        return graph, Computed(tokens, borrowed(logits))


class Memory:
    """A contiguous tensor of 16 or 32 bits as CUDA's array interface describes it, which owns nothing."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": f"<i{tensor.element_size()}",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, which is not kept from being used again."""
    return torch.as_tensor(Memory(tensor), device=tensor.device).view(tensor.dtype)


@contextmanager
def uncollected() -> Iterator[None]:
    """Keeps the garbage collector out: destroying an old graph while another is captured breaks the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@cache
def capture_stream() -> torch.cuda.Stream:
    """One per process: cuBLAS keeps a workspace for every stream it has seen."""
    return torch.cuda.Stream()
