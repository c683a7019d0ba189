"""Top-k, top-p and min-p for the rows that ask: list the tokens that can matter, find the exact cut among them, draw.

`_collect` lists, chunk by chunk, the tokens that reach the row's limit (usually a few hundred of the vocabulary). One
program per row then finds the lowest surviving logit by its bit pattern, four bits per pass over the lists, and takes
the Gumbel-max of the survivors. A chunk with too many tokens for its list is read whole instead: every distribution
gives the exact result, flat ones only take longer. All sums have a fixed order, so a row's token depends on no other.
"""

import torch
import triton.language as tl
from torch import Tensor

from stoker.kernels import philox
from stoker.kernels.launch import cdiv, jit, power_of_two
from stoker.kernels.sampling_math import UNALIGNED, better, exponential, philox_words, sort_key

STRIDE = tl.constexpr(philox.STRIDE)
CHUNK = tl.constexpr(4 * philox.STRIDE)
# Entries of a chunk's list, and tokens that a pass looks at together.
LIST = tl.constexpr(512)
TILE = 2048
SETTLED = tl.constexpr(-1)


def draw(
    logits: Tensor, params: tuple[Tensor, ...], limits: Tensor, summary: Tensor, tokens: Tensor, digits: int
) -> None:
    """Fill tokens[s] for every row whose limits[s] isn't SETTLED; summary [2, S] holds the rows' peaks and masses."""
    rows, vocab = logits.shape
    chunks = cdiv(vocab, CHUNK.value)
    lists = torch.empty((rows, chunks, LIST.value), dtype=torch.int16, device=logits.device)
    counts = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    _collect[(rows, chunks)](logits, limits, lists, counts, logits.stride(0), vocab, num_warps=4)
    _draw[(rows,)](
        logits, *params, limits, summary, lists, counts, tokens, logits.stride(0),
        vocab, chunks, power_of_two(chunks), max(TILE, power_of_two(chunks)), digits, num_warps=8,
    )  # fmt: skip


@jit
def _collect(logits_ptr, limits_ptr, lists_ptr, counts_ptr, stride, VOCAB: tl.constexpr):
    """One program per chunk: how many of its tokens reach the row's limit, and the places of the first LIST."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    limit = tl.load(limits_ptr + row)
    if limit != SETTLED:
        cell = row * tl.num_programs(1) + chunk
        logits_chunk = logits_ptr + row.to(tl.int64) * stride + chunk * CHUNK
        lowest = limit.to(tl.uint32, bitcast=True)
        reached = ()
        counts = tl.zeros([STRIDE], tl.int32)
        for lane in tl.static_range(4):  # pyright: ignore[reportGeneralTypeIssues]
            place = tl.arange(0, STRIDE) + lane * STRIDE
            inside = chunk * CHUNK + place < VOCAB
            logits = tl.load(logits_chunk + place, mask=inside, other=float("-inf"))
            reached = reached + (inside & (sort_key(logits.to(tl.float32)) >= lowest),)
            counts += reached[lane].to(tl.int32)
        count = tl.sum(counts)
        tl.store(counts_ptr + cell, count)
        if (count > 0) & (count <= LIST):
            entry = lists_ptr + cell.to(tl.int64) * LIST + tl.cumsum(counts, 0) - counts
            for lane in tl.static_range(4):  # pyright: ignore[reportGeneralTypeIssues]
                tl.store(entry, (tl.arange(0, STRIDE) + lane * STRIDE).to(tl.int16), mask=reached[lane])
                entry += reached[lane].to(tl.int32)


@jit(do_not_specialize_on_alignment=UNALIGNED)
def _draw(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr,
    limits_ptr, summary_ptr, lists_ptr, counts_ptr, tokens_ptr, stride,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr, TILE: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """One program per row: find the filters' cut, then draw."""
    row = tl.program_id(0)
    limit = tl.load(limits_ptr + row)
    if limit != SETTLED:
        logits_row = logits_ptr + row.to(tl.int64) * stride
        lists_row = lists_ptr + row.to(tl.int64) * CHUNKS * LIST
        counts_row = counts_ptr + row * CHUNKS
        peak, mass = tl.load(summary_ptr + row), tl.load(summary_ptr + tl.num_programs(0) + row)
        temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
        top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        where = (logits_row, lists_row, counts_row, _longest(counts_row, CHUNKS, CHUNKS_BLOCK))
        lowest = limit.to(tl.uint32, bitcast=True)
        floor = _floor(where, lowest, peak, mass, 1 / temperature, top_k, top_p, VOCAB, CHUNKS_BLOCK, TILE, DIGITS)
        least = peak + temperature * tl.log(min_p)
        seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
        token = _gumbel_max(where, floor, least, peak, 1 / temperature, seed, position, VOCAB, CHUNKS_BLOCK, TILE)
        tl.store(tokens_ptr + row, token.to(tl.int64))


@jit
def _longest(counts_row, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr):
    """Entries of the longest list; a whole chunk where one overflowed."""
    chunk = tl.arange(0, CHUNKS_BLOCK)
    longest = tl.max(tl.load(counts_row + chunk, mask=chunk < CHUNKS, other=0))
    return tl.where(longest > LIST, CHUNK, longest)


@jit
def _listed(where, base, VOCAB: tl.constexpr, CHUNKS_BLOCK: tl.constexpr, TILE: tl.constexpr):
    """TILE listed tokens, TILE // CHUNKS_BLOCK of each chunk from entry `base` on: id, logit, sort key (0 = none)."""
    logits_row, lists_row, counts_row, _ = where
    index = tl.arange(0, TILE)
    chunk = index // (TILE // CHUNKS_BLOCK)
    entry = base + index % (TILE // CHUNKS_BLOCK)
    count = tl.load(counts_row + chunk, mask=chunk * CHUNK < VOCAB, other=0)
    whole = count > LIST
    inside = entry < tl.where(whole, CHUNK, count)
    place = tl.load(lists_row + chunk * LIST + entry, mask=inside & (count <= LIST), other=0).to(tl.int32)
    token = chunk * CHUNK + tl.where(whole, entry, place)
    inside = inside & (token < VOCAB)
    logits = tl.load(logits_row + token, mask=inside, other=float("-inf")).to(tl.float32)
    return token, logits, tl.where(inside, sort_key(logits), 0)


@jit
def _floor(
    where, limit, peak, mass, rate, top_k, top_p, VOCAB: tl.constexpr, CHUNKS_BLOCK: tl.constexpr,
    TILE: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """Sort key of the lowest logit that survives top-k and then top-p, at least `limit`."""
    floor = limit
    if (top_k > 0) & (top_k < VOCAB):
        wanted = top_k.to(tl.float32)
        floor = _highest(where, floor, peak, rate, wanted, True, VOCAB, CHUNKS_BLOCK, TILE, DIGITS)
        mass = tl.max(_masses(where, floor, floor, 0, peak, rate, False, VOCAB, CHUNKS_BLOCK, TILE))
    if top_p < 1:
        # The likeliest token weighs 1 and stays, however small top_p is.
        wanted = tl.maximum(top_p * mass, 1.0e-30)
        floor = _highest(where, floor, peak, rate, wanted, False, VOCAB, CHUNKS_BLOCK, TILE, DIGITS)
    return floor


@jit
def _highest(
    where, floor, peak, rate, wanted, COUNT: tl.constexpr, VOCAB: tl.constexpr, CHUNKS_BLOCK: tl.constexpr,
    TILE: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """The highest sort key that logits of `wanted` mass (or number) reach, or `floor` where they have less."""
    ceiling = sort_key(peak)
    digit = tl.arange(0, 16).to(tl.uint32)
    found = tl.zeros([], tl.uint32)
    shift = tl.full([], 32, tl.uint32)
    for _ in range(DIGITS):
        shift -= 4
        if (ceiling >> shift) == (floor >> shift):
            found = (floor >> shift) << shift
        else:
            masses = _masses(where, floor, found, shift, peak, rate, COUNT, VOCAB, CHUNKS_BLOCK, TILE)
            found += tl.sum(((masses >= wanted) & (digit > 0)).to(tl.uint32)) << shift
    return tl.maximum(found, floor)


@jit
def _masses(
    where, floor, start, shift, peak, rate, COUNT: tl.constexpr, VOCAB: tl.constexpr, CHUNKS_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Mass (or number) of the logits that reach `floor` and `start + (digit << shift)`, for 16 digits."""
    border = start + (tl.arange(0, 16).to(tl.uint32) << shift)
    total = tl.zeros([16], tl.float32)
    for base in range(0, where[3], TILE // CHUNKS_BLOCK):
        _, logits, key = _listed(where, base, VOCAB, CHUNKS_BLOCK, TILE)
        mass = tl.where(key >= floor, 1.0, 0.0)
        if not COUNT:
            mass = mass * tl.exp((logits - peak) * rate)
        total += tl.sum(tl.where(key[None, :] >= border[:, None], mass[None, :], 0.0), 1)
    return total


@jit
def _gumbel_max(
    where, floor, least, peak, rate, seed, position, VOCAB: tl.constexpr, CHUNKS_BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """The winner among the tokens whose sort key reaches `floor` and whose logit reaches `least`."""
    best = tl.full([TILE], float("inf"), tl.float32)
    winner = tl.full([TILE], VOCAB, tl.int32)
    for base in range(0, where[3], TILE // CHUNKS_BLOCK):
        token, logits, key = _listed(where, base, VOCAB, CHUNKS_BLOCK, TILE)
        word0, word1, word2, word3 = philox_words(
            seed, position, (token // CHUNK * STRIDE + token % STRIDE).to(tl.uint32)
        )
        lane = token // STRIDE % 4
        word = tl.where(lane < 2, tl.where(lane == 0, word0, word1), tl.where(lane == 2, word2, word3))
        cost = exponential(word) * tl.exp((peak - logits) * rate)
        cost = tl.where((key >= floor) & (logits >= least), cost, float("inf"))
        ahead = (cost < best) | ((cost == best) & (token < winner))
        best = tl.where(ahead, cost, best)
        winner = tl.where(ahead, token, winner)
    _, token = better(-best, winner)
    return token
