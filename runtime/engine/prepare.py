"""A step's input on a GPU: the upload, read where the host wrote it, and `state.derive` in one Triton launch, a program
per sequence and one for the padding behind them."""

import torch
import triton.language as tl

from stoker.kernels.launch import cdiv, jit, power_of_two
from stoker.runtime.engine.prefix import BLOCK_TOKENS
from stoker.runtime.engine.state import Batch, Table


def fetch(target: torch.Tensor, pinned: torch.Tensor) -> None:
    """Copies int32 words out of pinned host memory. Not a copy of the driver's: those run one after the other, and a
    step would wait for all the weights of another model that are on their way."""
    size = pinned.numel()
    _fetch[(cdiv(size, 1024),)](target, pinned, size, 1024, num_warps=4)


@jit(do_not_specialize=["size"])
def _fetch(target_ptr, pinned_ptr, size, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + index, tl.load(pinned_ptr + index, mask=index < size), mask=index < size)


def derive(
    table: Table, rows: torch.Tensor, starts: torch.Tensor, query_start: torch.Tensor, given: torch.Tensor
) -> Batch:
    sequences, tokens = rows.numel(), given.numel()
    device = given.device
    ids, positions, slots = (torch.empty(tokens, dtype=torch.int64, device=device) for _ in range(3))
    last, wide, seed, position = (torch.empty(sequences, dtype=torch.int64, device=device) for _ in range(4))
    context_len, top_k = (torch.empty(sequences, dtype=torch.int32, device=device) for _ in range(2))
    temperature, top_p, min_p = (torch.empty(sequences, dtype=torch.float32, device=device) for _ in range(3))
    block_table = torch.empty(sequences, table.width, dtype=torch.int32, device=device)
    _derive[(sequences + 1,)](
        rows, starts, query_start, given,
        table.last_token, table.blocks, table.params, table.params.view(torch.float32), table.params.view(torch.int64),
        ids, positions, slots, block_table, context_len, last, wide,
        temperature, top_k, top_p, min_p, seed, position,
        sequences, tokens, table.width, power_of_two(table.width), BLOCK_TOKENS, num_warps=4,
    )  # fmt: skip
    return Batch(ids, positions, slots, block_table, query_start, context_len, last, wide,
                 temperature, top_k, top_p, min_p, seed, position)  # fmt: skip


@jit(do_not_specialize=["sequences", "tokens"])
def _derive(
    rows_ptr, starts_ptr, query_start_ptr, given_ptr,
    last_token_ptr, blocks_ptr, params_ptr, float_params_ptr, wide_params_ptr,
    ids_ptr, positions_ptr, slots_ptr, block_table_ptr, context_ptr, last_ptr, wide_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr,
    sequences, tokens, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    begin = tl.load(query_start_ptr + sequence)
    if sequence == sequences:
        _pad(begin, tokens, ids_ptr, positions_ptr, slots_ptr)
    else:
        count = tl.load(query_start_ptr + sequence + 1) - begin
        row = tl.load(rows_ptr + sequence).to(tl.int64)
        start = tl.load(starts_ptr + sequence)
        own_blocks = blocks_ptr + row * WIDTH
        newest = tl.maximum(tl.load(last_token_ptr + row), 0)
        _place(begin, count, start, newest, own_blocks, given_ptr, ids_ptr, positions_ptr, slots_ptr, BLOCK_TOKENS)
        column = tl.arange(0, WIDTH_BLOCK)
        copied = tl.load(own_blocks + column, mask=column < WIDTH, other=0)
        tl.store(block_table_ptr + sequence.to(tl.int64) * WIDTH + column, copied, mask=column < WIDTH)
        end = start + count
        tl.store(context_ptr + sequence, tl.where(count > 0, end, 0))
        tl.store(last_ptr + sequence, tl.maximum(begin + count - 1, 0).to(tl.int64))
        tl.store(wide_ptr + sequence, row)
        tl.store(position_ptr + sequence, end.to(tl.int64))
        # The order of words is that of batch.param_words.
        tl.store(temperature_ptr + sequence, tl.load(float_params_ptr + row * 8))
        tl.store(top_p_ptr + sequence, tl.load(float_params_ptr + row * 8 + 1))
        tl.store(min_p_ptr + sequence, tl.load(float_params_ptr + row * 8 + 2))
        tl.store(top_k_ptr + sequence, tl.load(params_ptr + row * 8 + 3))
        tl.store(seed_ptr + sequence, tl.load(wide_params_ptr + row * 4 + 2))


@jit
def _place(
    begin, count, start, newest, own_blocks, given_ptr, ids_ptr, positions_ptr, slots_ptr, BLOCK_TOKENS: tl.constexpr
):
    """Ids, positions and slots of one sequence's tokens."""
    for base in range(0, count, 1024):
        index = base + tl.arange(0, 1024)
        inside = index < count
        given = tl.load(given_ptr + begin + index, mask=inside, other=0).to(tl.int64)
        position = start + index
        block = tl.load(own_blocks + position // BLOCK_TOKENS, mask=inside, other=0).to(tl.int64)
        tl.store(ids_ptr + begin + index, tl.where(given < 0, newest, given), mask=inside)
        tl.store(positions_ptr + begin + index, position.to(tl.int64), mask=inside)
        tl.store(slots_ptr + begin + index, block * BLOCK_TOKENS + position % BLOCK_TOKENS, mask=inside)


@jit
def _pad(begin, tokens, ids_ptr, positions_ptr, slots_ptr):
    """The tokens behind the last sequence."""
    for base in range(begin, tokens, 1024):
        index = base + tl.arange(0, 1024)
        inside = index < tokens
        nothing = tl.zeros([1024], tl.int64)
        tl.store(ids_ptr + index, nothing, mask=inside)
        tl.store(positions_ptr + index, nothing, mask=inside)
        tl.store(slots_ptr + index, nothing - 1, mask=inside)
