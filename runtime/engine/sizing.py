"""How many KV blocks a model gets, and a clear refusal when they can't hold one sequence of the longest length."""

from dataclasses import dataclass

import psutil
import torch

from stoker.runtime.engine.config import ModelConfig
from stoker.runtime.engine.graphs import DRIVER_BYTES_PER_LAYER, POOL_BYTES, buckets
from stoker.runtime.engine.options import EngineOptions
from stoker.runtime.engine.prefix import BLOCK_TOKENS
from stoker.runtime.engine.sequence import blocks_for

# Share of the memory that is free once the weights are in place. A CPU's is shared with everything else on the host.
FREE_SHARE = {"cuda": 0.9, "cpu": 0.25}


@dataclass(frozen=True, slots=True)
class KVSize:
    """`num_blocks` usable blocks of `block_bytes` each; the null block comes on top."""

    num_blocks: int
    block_bytes: int

    @property
    def total_bytes(self) -> int:
        return (self.num_blocks + 1) * self.block_bytes


class NotEnoughMemory(MemoryError):
    """The KV cache can't hold `max_model_len` tokens; the message says by how much and what to set."""


def block_bytes(config: ModelConfig, options: EngineOptions) -> int:
    return config.num_layers * 2 * BLOCK_TOKENS * config.kv_dim * options.torch_dtype.itemsize


def kv_size(config: ModelConfig, options: EngineOptions, free_bytes: int) -> KVSize:
    """Blocks from `num_blocks`, else `kv_bytes`, else from `free_bytes`. `options` are resolved."""
    return most_blocks(config, options, usable(config, options, free_bytes))


def most_blocks(config: ModelConfig, options: EngineOptions, room: int) -> KVSize:
    """As `kv_size`, all `room` bytes being there for the KV cache."""
    size = block_bytes(config, options)
    useful = options.max_seqs * blocks_for(options.max_model_len)
    granted = options.kv_bytes or min(room, (useful + 1) * size)
    blocks = options.num_blocks or granted // size - 1
    require_one_sequence(options, blocks, size)
    return KVSize(blocks, size)


def usable(config: ModelConfig, options: EngineOptions, free_bytes: int) -> int:
    reserve = activation_bytes(config, options, options.token_budget, options.max_seqs) + graph_reserve(config, options)
    return max(0, int(free_bytes * FREE_SHARE[options.device]) - reserve)


def activation_bytes(config: ModelConfig, options: EngineOptions, tokens: int, sequences: int) -> int:
    """Peak of one step: the widest layer's intermediates, and float32 logits with the sampler's two copies."""
    width = 4 * config.hidden_size + config.query_dim + 2 * config.kv_dim + 3 * config.intermediate_size
    return tokens * width * options.torch_dtype.itemsize + 3 * sequences * config.vocab_size * 4


def graph_reserve(config: ModelConfig, options: EngineOptions) -> int:
    """Kept free for CUDA graphs, which are captured later: the activations of the largest, and the driver's share of
    each."""
    choices = buckets(config, options) if options.cuda_graphs else []
    if not choices:
        return 0
    largest = max(activation_bytes(config, options, bucket.tokens, bucket.sequences) for bucket in choices)
    return largest + len(choices) * config.num_layers * DRIVER_BYTES_PER_LAYER + POOL_BYTES


def require_one_sequence(options: EngineOptions, blocks: int, size: int) -> None:
    needed = blocks_for(options.max_model_len)
    if blocks < needed:
        held = max(0, blocks) * BLOCK_TOKENS
        raise NotEnoughMemory(
            f"the KV cache of {max(0, blocks)} blocks holds {held} tokens, but one sequence may have "
            f"{options.max_model_len}: short of {(needed - blocks) * size} bytes. "
            f"Set kv_bytes to {(needed + 1) * size} or more, or max_model_len to {held} or less"
        )


def free_bytes(device: str) -> int:
    return psutil.virtual_memory().available if device == "cpu" else torch.cuda.mem_get_info()[0]


def total_bytes(device: str) -> int:
    return psutil.virtual_memory().total if device == "cpu" else torch.cuda.mem_get_info()[1]
