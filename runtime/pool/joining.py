"""How a model is counted when it joins the others of its device, and how the first one opens the device's pool."""

import logging

import torch

from stoker.runtime.engine.config import ModelConfig
from stoker.runtime.engine.loading import Blueprint
from stoker.runtime.engine.prefix import BLOCK_TOKENS
from stoker.runtime.engine.sequence import blocks_for
from stoker.runtime.engine.sizing import KVSize, activation_bytes, block_bytes, free_bytes, graph_reserve, most_blocks
from stoker.runtime.pool.device_pool import DevicePool, Member

SHARE = {"cuda": 0.9, "cpu": 0.5}
"""Of the memory that is free when the first model comes. A CPU's is shared with everything else on the host, but only
what is used of it is taken."""
WORKSPACE = 0.1
"""Share of a GPU's part that isn't weights and KV cache: intermediate values of a step, and CUDA graphs."""
LIBRARIES = 256 << 20
"""What cuBLAS and the allocator have beside that, at most."""

log = logging.getLogger(__name__)


def open_pool(plan: Blueprint, limit: int) -> DevicePool:
    """With `limit` bytes of the device that the model is for (0: a share of what is free)."""
    device = plan.options.device
    size = limit or int(free_bytes(device) * SHARE[device])
    if device == "cpu":
        return DevicePool(device, size, 0)
    if limit:
        # What isn't in the ledger (a library's workspace) meets this wall instead of other processes' memory.
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.mem_get_info()[1]))
    config, options = plan.config, plan.options
    step = 0
    if isinstance(config, ModelConfig):
        step = activation_bytes(config, options, options.token_budget, options.max_seqs)
    workspace = max(int(size * WORKSPACE), step + LIBRARIES)
    if 2 * workspace > size and limit:
        log.warning("%d of %d bytes of device memory are kept for steps and libraries", workspace, size)
    return DevicePool(device, max(0, size - workspace), workspace - step)


def member_of(name: str, plan: Blueprint, pool: DevicePool) -> Member:
    """Raises NotEnoughMemory when the KV cache can't hold one sequence of the longest length."""
    config, options = plan.config, plan.options
    if not isinstance(config, ModelConfig):
        return Member(name, plan.arena_bytes)
    size = block_bytes(config, options)
    fixed = plan.arena_bytes + plan.slots_bytes
    most = most_blocks(config, options, max(0, pool.ledger.capacity - fixed)).num_blocks
    least = min(most, blocks_for(options.max_model_len) + 1)
    return Member(name, fixed, size, least, most, graph_reserve(config, options))


def cache_of(plan: Blueprint, name: str, pool: DevicePool) -> tuple[KVSize, torch.Tensor] | None:
    """A decoder's view of the arena as KV blocks, and how many of them are of use to it. Raises MemoryError."""
    config, member = plan.config, pool.members[name]
    if not isinstance(config, ModelConfig):
        return None
    shape = (config.num_layers, 2, BLOCK_TOKENS, config.num_kv_heads, config.head_dim)
    return KVSize(member.most, member.block_bytes), pool.arena.cache(shape, plan.options.torch_dtype)
