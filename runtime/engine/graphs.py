"""Whole steps as CUDA graphs: one per bucket, captured when the engine can afford it, replayed ever after.

A step is padded to the smallest bucket that holds it. Padding has no tokens, or tokens with slot -1 and no context: it
reads no cache and writes none. All graphs share one memory pool: they run one after the other, and nothing in the pool
outlives a step but the sampled tokens, which are copied out before the next one starts.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from stoker.runtime.engine.batch import Bucket
from stoker.runtime.engine.options import EngineOptions

log = logging.getLogger(__name__)

DECODE_SIZES = (1, 2, 4, *range(8, 65, 8), 96, 128, *range(192, 513, 64))
MIXED_TOKENS = (64, 128, 256, 512, 1024, 2048)
FEW_SEQUENCES = 8
"""Mixed steps have a bucket for few sequences too: fewer rows go through the head, and attention takes larger tiles."""
DRIVER_BYTES_PER_LAYER = 256 << 10
"""What the driver keeps for one layer's launches in one graph (about ten kernels), rounded up."""

Compute = Callable[[Bucket], torch.Tensor]


def buckets(options: EngineOptions) -> list[Bucket]:
    """Smallest first; decode steps (one token per sequence), then mixed ones. `options` are resolved."""
    decode = sorted({min(size, options.max_seqs) for size in DECODE_SIZES})
    mixed = {
        Bucket(min(sequences, options.max_seqs), tokens)
        for tokens in MIXED_TOKENS
        for sequences in (FEW_SEQUENCES, tokens - 1)
        if tokens <= options.token_budget
    }
    return [Bucket(size, size) for size in decode] + sorted(mixed, key=lambda bucket: (bucket.tokens, bucket))


def fitting(choices: list[Bucket], sequences: int, tokens: int) -> Bucket | None:
    """The smallest bucket for a step. Decode and mixed steps are never exchanged: attention is cut differently."""
    decodes = sequences == tokens
    for bucket in choices:
        is_decode = bucket.sequences == bucket.tokens
        if is_decode == decodes and bucket.sequences >= sequences and bucket.tokens >= tokens:
            return bucket
    return None


class Graphs:
    """`layers` of the model tell the size of a graph; at most about `budget` bytes are used for all."""

    def __init__(self, options: EngineOptions, layers: int, budget: int) -> None:
        self.choices = buckets(options) if options.device == "cuda" else []
        self.bytes = 0
        self.replays = 0
        self._missing = self.choices[::-1] if options.cuda_graphs else []
        self._driver_bytes = layers * DRIVER_BYTES_PER_LAYER
        self._budget = budget
        self._captured: dict[Bucket, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._captured)

    def replay(self, bucket: Bucket) -> torch.Tensor | None:
        """The sampled tokens, valid until the next replay; None when there is no graph for this bucket."""
        if found := self._captured.get(bucket):
            graph, tokens = found
            graph.replay()
            self.replays += 1
            return tokens
        return None

    def next_missing(self) -> Bucket | None:
        """The largest bucket without a graph, so that the ones after it find room in its memory."""
        return self._missing[0] if self._missing and self.bytes < self._budget else None

    def capture(self, bucket: Bucket, compute: Compute) -> None:
        """`compute` makes the sampled tokens from what the device was sent. It must have run eagerly for this bucket
        before, so that every kernel is loaded."""
        if bucket not in self._missing or self.bytes >= self._budget:
            return
        self._missing.remove(bucket)
        before = torch.cuda.memory_reserved()
        try:
            self._captured[bucket] = self._record(bucket, compute)
        except torch.AcceleratorError:
            raise
        except Exception:
            log.exception("no graph for steps of %d sequences and %d tokens", *bucket)
        self.bytes += torch.cuda.memory_reserved() - before + self._driver_bytes

    def _record(self, bucket: Bucket, compute: Compute) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph, main, side = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), capture_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            # Not torch.cuda.graph(): it waits for the device and collects garbage, while a step is in flight here.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                tokens = compute(bucket)
            finally:
                graph.capture_end()
        main.wait_stream(side)
        return graph, tokens


def graph_bytes(options: EngineOptions, layers: int, activation_bytes: Callable[[int, int], int]) -> int:
    """To be kept free for graphs: the activations of the largest bucket, and the driver's share of each."""
    choices = buckets(options) if options.cuda_graphs else []
    largest = max((activation_bytes(bucket.tokens, bucket.sequences) for bucket in choices), default=0)
    return largest + len(choices) * layers * DRIVER_BYTES_PER_LAYER


@cache
def capture_stream() -> torch.cuda.Stream:
    """One per process: cuBLAS keeps a workspace for every stream it has seen."""
    return torch.cuda.Stream()
