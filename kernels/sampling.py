"""Sampling on the device in four launches: scan the logits, settle the rows that need no more, then filter the others.

Rows without filters (greedy or temperature alone) are decided by the scan: Gumbel-max needs one pass. For rows with
top-k, top-p or min-p the scan also leaves the maxima of groups of tokens and the row's mass; from these follows a
logit below which no token can survive, and `filters` looks only at what reaches it. Other rows leave those launches at
once. Noise and semantics are those of `philox` and `reference.sample`.
"""

import torch
import triton.language as tl
from torch import Tensor

from stoker.kernels import filters, philox, reference
from stoker.kernels.launch import cdiv, jit, power_of_two
from stoker.kernels.sampling_math import UNALIGNED, better, exponential, philox_words, sort_key

STRIDE = tl.constexpr(philox.STRIDE)
CHUNK = 4 * philox.STRIDE
GROUPS = tl.constexpr(32)
GREEDY_BELOW = tl.constexpr(reference.GREEDY_BELOW)


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, position: Tensor
) -> Tensor:
    rows, vocab = logits.shape
    chunks = cdiv(vocab, CHUNK)
    peaks, scores, masses = torch.empty((3, rows, chunks), dtype=torch.float32, device=logits.device)
    tops = torch.empty((rows, chunks, GROUPS.value), dtype=torch.float32, device=logits.device)
    winners = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    limits = torch.empty(rows, dtype=torch.int32, device=logits.device)
    summary = torch.empty((2, rows), dtype=torch.float32, device=logits.device)
    params = (temperature, top_k, top_p, min_p, seed, position)
    _scan[(rows, chunks)](logits, *params, peaks, masses, tops, scores, winners, logits.stride(0), vocab, num_warps=4)
    digits = 4 if logits.dtype == torch.bfloat16 else 8
    _settle[(rows,)](
        temperature, top_k, top_p, min_p, peaks, masses, tops, scores, winners, limits, summary, tokens,
        vocab, chunks, power_of_two(chunks), digits, num_warps=4,
    )  # fmt: skip
    filters.draw(logits, params, limits, summary, tokens, digits)
    return tokens


@jit(do_not_specialize_on_alignment=UNALIGNED)
def _scan(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr,
    peaks_ptr, masses_ptr, tops_ptr, scores_ptr, winners_ptr, stride, VOCAB: tl.constexpr,
):  # fmt: skip
    """One program: 4 * STRIDE neighbouring tokens of a row; their best score, or what the filters need."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    logits_chunk = logits_ptr + row.to(tl.int64) * stride + chunk * 4 * STRIDE
    logits, peak, high = _loaded(logits_chunk, chunk, VOCAB)
    temperature = tl.load(temperature_ptr + row)
    drawn = temperature >= GREEDY_BELOW
    filtered = drawn & _has_filter(row, top_k_ptr, top_p_ptr, min_p_ptr, VOCAB)
    cell = row * tl.num_programs(1) + chunk
    tl.store(peaks_ptr + cell, peak)
    # -inf - -inf has no place below: a chunk of forbidden tokens is measured from 0.
    base = tl.where(peak == float("-inf"), 0.0, peak)
    if filtered:
        group = tl.arange(0, GROUPS)
        tl.store(tops_ptr + cell * GROUPS + group, tl.max(tl.reshape(high, [GROUPS, STRIDE // GROUPS]), 1))
        tl.store(masses_ptr + cell, _mass(logits, base, 1 / temperature))
    else:
        cost, token = _cheapest(logits, base, chunk, temperature, seed_ptr + row, position_ptr + row, drawn, VOCAB)
        score = peak
        if drawn:
            score = base / temperature - tl.log(cost)
        tl.store(scores_ptr + cell, score)
        tl.store(winners_ptr + cell, token)


@jit
def _loaded(logits_chunk, chunk, VOCAB: tl.constexpr):
    """The chunk's logits as four vectors, their peak, and their elementwise maximum (NaN counts as infinite)."""
    logits = ()
    high = tl.full([STRIDE], float("-inf"), tl.float32)
    for lane in tl.static_range(4):  # pyright: ignore[reportGeneralTypeIssues]
        offset = tl.arange(0, STRIDE) + lane * STRIDE
        inside = chunk * 4 * STRIDE + offset < VOCAB
        logits = logits + (tl.load(logits_chunk + offset, mask=inside, other=float("-inf")).to(tl.float32),)
    for lane in tl.static_range(4):  # pyright: ignore[reportGeneralTypeIssues]
        # NaN anywhere makes the peak infinite, which rejects the row.
        high = tl.maximum(high, tl.where(logits[lane] != logits[lane], float("inf"), logits[lane]))
    return logits, tl.max(high), high


@jit
def _mass(logits, base, rate):
    """Sum of the chunk's tempered weights, relative to the one of `base`."""
    mass = tl.zeros([STRIDE], tl.float32)
    for lane in tl.static_range(4):  # pyright: ignore[reportGeneralTypeIssues]
        mass += tl.exp((logits[lane] - base) * rate)
    return tl.sum(mass)


@jit
def _cheapest(logits, base, chunk, temperature, seed_ptr, position_ptr, drawn, VOCAB: tl.constexpr):
    """The least distance from `base`, or for drawn rows exponential noise over weight, and its lowest token."""
    place = tl.arange(0, STRIDE)
    counter = (place + chunk * STRIDE).to(tl.uint32)
    words = (counter, counter, counter, counter)
    if drawn:
        words = philox_words(tl.load(seed_ptr), tl.load(position_ptr), counter)
    rate = 1 / temperature
    best = tl.full([STRIDE], float("inf"), tl.float32)
    winner = tl.full([STRIDE], VOCAB, tl.int32)
    for lane in tl.static_range(4):  # pyright: ignore[reportGeneralTypeIssues]
        cost = base - logits[lane]
        if drawn:
            cost = exponential(words[lane]) * tl.exp(cost * rate)
        ahead = cost < best
        best = tl.where(ahead, cost, best)
        winner = tl.where(ahead, chunk * 4 * STRIDE + lane * STRIDE + place, winner)
    score, token = better(-best, winner)
    return -score, token


@jit(do_not_specialize_on_alignment=UNALIGNED)
def _settle(
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, peaks_ptr, masses_ptr, tops_ptr, scores_ptr, winners_ptr,
    limits_ptr, summary_ptr, tokens_ptr, VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr,
    DIGITS: tl.constexpr,
):  # fmt: skip
    """One program per row: reject it, take the scan's winner, or leave a limit, peak and mass to the filters."""
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS_BLOCK)
    inside = chunk < CHUNKS
    peaks = tl.load(peaks_ptr + row * CHUNKS + chunk, mask=inside, other=float("-inf"))
    peak = tl.max(peaks)
    temperature = tl.load(temperature_ptr + row)
    # No float has this sort key: nothing is left to filter.
    limit = tl.full([], filters.SETTLED, tl.int32)
    if (peak == float("inf")) | (peak == float("-inf")):
        tl.store(tokens_ptr + row, -1)
    elif (temperature >= GREEDY_BELOW) & _has_filter(row, top_k_ptr, top_p_ptr, min_p_ptr, VOCAB):
        masses = tl.load(masses_ptr + row * CHUNKS + chunk, mask=inside, other=0)
        mass = tl.sum(masses * tl.exp((peaks - peak) / temperature))
        tl.store(summary_ptr + row, peak)
        tl.store(summary_ptr + tl.num_programs(0) + row, mass)
        tops = tops_ptr + row * CHUNKS * GROUPS
        top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        found = _limit(tops, peak, mass, temperature, top_k, top_p, min_p, VOCAB, CHUNKS, CHUNKS_BLOCK, DIGITS)
        limit = found.to(tl.int32, bitcast=True)
    else:
        score = tl.load(scores_ptr + row * CHUNKS + chunk, mask=inside, other=float("-inf"))
        winner = tl.load(winners_ptr + row * CHUNKS + chunk, mask=inside, other=VOCAB)
        _, token = better(score, winner)
        tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(limits_ptr + row, limit)


@jit
def _has_filter(row, top_k_ptr, top_p_ptr, min_p_ptr, VOCAB: tl.constexpr):
    top_k = tl.load(top_k_ptr + row)
    limited = (top_k > 0) & (top_k < VOCAB)
    return limited | (tl.load(top_p_ptr + row) < 1) | (tl.load(min_p_ptr + row) > 0)


@jit
def _limit(
    tops_row, peak, mass, temperature, top_k, top_p, min_p, VOCAB: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """A sort key that every token which survives the filters, or decides them, reaches."""
    lowest = peak + temperature * tl.log(min_p)
    if top_p < 1:
        # All tokens lighter than this together weigh less than what top-p may cut; 0.99 is for rounding.
        light = 0.99 * (1 - top_p) * mass / VOCAB
        lowest = tl.maximum(lowest, peak + temperature * tl.log(light))
    limit = sort_key(lowest)
    if (top_k > 0) & (top_k < VOCAB):
        # Top-p then counts only the mass that top-k leaves, so all of that must be seen. At least k tokens reach the
        # k-th highest of the groups' maxima.
        group = tl.arange(0, CHUNKS_BLOCK * GROUPS)
        tops = sort_key(tl.load(tops_row + group, mask=group < CHUNKS * GROUPS, other=float("-inf")))
        limit = _kth(tops, top_k, DIGITS)
    return limit


@jit
def _kth(keys, k, DIGITS: tl.constexpr):
    """The top 4 * DIGITS bits of the k-th highest key, 0 where there are fewer."""
    digit = tl.arange(0, 16).to(tl.uint32)
    found = tl.zeros([], tl.uint32)
    shift = tl.full([], 32, tl.uint32)
    for _ in range(DIGITS):
        shift -= 4
        number = tl.sum((keys[None, :] >= (found + (digit << shift))[:, None]).to(tl.int32), 1)
        found += tl.sum(((number >= k) & (digit > 0)).to(tl.uint32)) << shift
    return found
