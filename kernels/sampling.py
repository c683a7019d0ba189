"""Sampling on the device in two launches: a wide scan of the logits, then one program per row that settles the token.

Rows without filters (greedy or temperature alone) are decided by the scan: Gumbel-max needs one pass. Rows with top-k,
top-p or min-p find the lowest surviving logit by bisecting its bit pattern, two bits per pass over the row.
Noise and semantics are those of `philox` and `reference.sample`.
"""

import torch
import triton.language as tl

from stoker.kernels import philox, reference
from stoker.kernels.launch import cdiv, jit, power_of_two

STRIDE = tl.constexpr(philox.STRIDE)
GREEDY_BELOW = tl.constexpr(reference.GREEDY_BELOW)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    rows, vocab = logits.shape
    chunks = cdiv(vocab, 4 * philox.STRIDE)
    peaks, scores = torch.empty((2, rows, chunks), dtype=torch.float32, device=logits.device)
    winners = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    params = (temperature, top_k, top_p, min_p, seed, position)
    _scan[(rows, chunks)](logits, *params, peaks, scores, winners, logits.stride(0), vocab, num_warps=4)
    passes = 8 if logits.dtype == torch.bfloat16 else 16
    _settle[(rows,)](
        logits, *params, peaks, scores, winners, tokens, logits.stride(0), vocab, chunks,
        power_of_two(chunks), passes, num_warps=16,
    )  # fmt: skip
    return tokens


UNALIGNED = ["temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seed_ptr", "position_ptr"]


@jit(do_not_specialize_on_alignment=UNALIGNED)
def _scan(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr,
    peaks_ptr, scores_ptr, winners_ptr, stride, VOCAB: tl.constexpr,
):  # fmt: skip
    """One program: 4 * STRIDE neighbouring tokens of a row; their peak logit and, without filters, the best score."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    drawn = temperature >= GREEDY_BELOW
    filtered = drawn & _has_filter(row, top_k_ptr, top_p_ptr, min_p_ptr, VOCAB)
    noisy = drawn & (filtered == 0)
    words = _words(tl.load(seed_ptr + row), tl.load(position_ptr + row), chunk, noisy)
    logits_row = logits_ptr + row.to(tl.int64) * stride
    peak = float("-inf")
    best = float("-inf")
    winner = VOCAB
    for lane in tl.static_range(4):  # pyright: ignore[reportGeneralTypeIssues]
        token = tl.arange(0, STRIDE) + (chunk * 4 + lane) * STRIDE
        logits = tl.load(logits_row + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
        # NaN anywhere makes the peak infinite, which rejects the row.
        peak = tl.maximum(peak, tl.max(tl.where(logits != logits, float("inf"), logits)))
        score = logits
        if noisy:
            score = tl.math.div_rn(logits, temperature) + _gumbel(words[lane])
        best, winner = _better(best, winner, score, token)
    tl.store(peaks_ptr + row * tl.num_programs(1) + chunk, peak)
    tl.store(scores_ptr + row * tl.num_programs(1) + chunk, best)
    tl.store(winners_ptr + row * tl.num_programs(1) + chunk, winner)


@jit(do_not_specialize_on_alignment=UNALIGNED)
def _settle(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr,
    peaks_ptr, scores_ptr, winners_ptr, tokens_ptr, stride,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr, PASSES: tl.constexpr,
):  # fmt: skip
    """One program per row: reject it, take the scan's winner, or filter and draw."""
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS_BLOCK)
    inside = chunk < CHUNKS
    peak = tl.max(tl.load(peaks_ptr + row * CHUNKS + chunk, mask=inside, other=float("-inf")))
    temperature = tl.load(temperature_ptr + row)
    if (peak == float("inf")) | (peak == float("-inf")):
        tl.store(tokens_ptr + row, -1)
    elif (temperature >= GREEDY_BELOW) & _has_filter(row, top_k_ptr, top_p_ptr, min_p_ptr, VOCAB):
        logits_row = logits_ptr + row.to(tl.int64) * stride
        top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        floor = _floor(logits_row, peak, temperature, top_k, top_p, VOCAB, PASSES)
        least = peak + temperature * tl.log(min_p)
        seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
        token = _draw(logits_row, floor, least, temperature, seed, position, VOCAB, CHUNKS)
        tl.store(tokens_ptr + row, token.to(tl.int64))
    else:
        score = tl.load(scores_ptr + row * CHUNKS + chunk, mask=inside, other=float("-inf"))
        winner = tl.load(winners_ptr + row * CHUNKS + chunk, mask=inside, other=VOCAB)
        best, token = _better(float("-inf"), VOCAB, score, winner)
        tl.store(tokens_ptr + row, token.to(tl.int64))


@jit
def _has_filter(row, top_k_ptr, top_p_ptr, min_p_ptr, VOCAB: tl.constexpr):
    top_k = tl.load(top_k_ptr + row)
    limited = (top_k > 0) & (top_k < VOCAB)
    return limited | (tl.load(top_p_ptr + row) < 1) | (tl.load(min_p_ptr + row) > 0)


@jit
def _better(best, winner, score, token):
    """The higher of (best, winner) and the vector's top (score, token); on a tie the lower token id."""
    top = tl.max(score)
    first = tl.min(tl.where(score == top, token, 0x7FFFFFFF))
    ahead = (top > best) | ((top == best) & (first < winner))
    return tl.where(ahead, top, best), tl.where(ahead, first, winner)


@jit
def _words(seed, position, chunk, wanted):
    """Four vectors of STRIDE random words: lane i belongs to the chunk's tokens from i * STRIDE on."""
    counter = (tl.arange(0, STRIDE) + chunk * STRIDE).to(tl.uint32)
    zero = counter * 0
    low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    high = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    words = (counter, zero, low, high)
    if wanted:
        words = tl.philox(seed, counter, zero, low, high)
    return words


@jit
def _gumbel(word):
    u = tl.minimum(word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 1 - 5.9604644775390625e-08)
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4))))
    return -tl.log(tl.where(u < 0.015625, series, -tl.log(1 - u)))


@jit
def _sort_key(logits):
    """uint32 that orders like the float32 logits."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits | -0x80000000).to(tl.uint32, bitcast=True)


@jit
def _floor(logits_row, peak, temperature, top_k, top_p, VOCAB: tl.constexpr, PASSES: tl.constexpr):
    """Sort key of the lowest logit that survives top-k and then top-p."""
    floor = tl.zeros([], tl.uint32)
    if (top_k > 0) & (top_k < VOCAB):
        floor = _highest(logits_row, floor, peak, temperature, top_k.to(tl.float32), True, VOCAB, PASSES)
    if top_p < 1:
        # Every key is at least 0, so candidate 0 holds the whole mass.
        mass, _, _ = _masses(logits_row, floor, floor, floor, floor, peak, temperature, False, VOCAB)
        # The likeliest token weighs 1 and stays, however small top_p is.
        wanted = tl.maximum(top_p * mass, 1.0e-30)
        nucleus = _highest(logits_row, floor, peak, temperature, wanted, False, VOCAB, PASSES)
        floor = tl.maximum(floor, nucleus)
    return floor


@jit
def _highest(
    logits_row, floor, peak, temperature, wanted, COUNT: tl.constexpr, VOCAB: tl.constexpr, PASSES: tl.constexpr
):
    """The highest sort key v for which the logits from v up have at least `wanted` mass (or number)."""
    found = tl.zeros([], tl.uint32)
    unit = tl.zeros([], tl.uint32) + 0x40000000
    for _ in range(PASSES):
        one, two, three = found + unit, found + 2 * unit, found + 3 * unit
        mass1, mass2, mass3 = _masses(logits_row, floor, one, two, three, peak, temperature, COUNT, VOCAB)
        reached = (mass1 >= wanted).to(tl.uint32) + (mass2 >= wanted).to(tl.uint32) + (mass3 >= wanted).to(tl.uint32)
        found += unit * reached
        unit = unit >> 2
    return found


@jit
def _masses(logits_row, floor, one, two, three, peak, temperature, COUNT: tl.constexpr, VOCAB: tl.constexpr):
    """Mass (or number) of the logits at or above each of three sort keys, among those at or above `floor`."""
    BLOCK: tl.constexpr = 4 * STRIDE
    sum1 = tl.zeros([BLOCK], tl.float32)
    sum2 = tl.zeros([BLOCK], tl.float32)
    sum3 = tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCAB, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_row + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
        key = _sort_key(logits)
        mass = tl.where((token < VOCAB) & (key >= floor), 1.0, 0.0)
        if not COUNT:
            mass = mass * tl.exp((logits - peak) / temperature)
        sum1 += tl.where(key >= one, mass, 0.0)
        sum2 += tl.where(key >= two, mass, 0.0)
        sum3 += tl.where(key >= three, mass, 0.0)
    return tl.sum(sum1), tl.sum(sum2), tl.sum(sum3)


@jit
def _draw(logits_row, floor, least, temperature, seed, position, VOCAB: tl.constexpr, CHUNKS: tl.constexpr):
    """Gumbel-max over the logits whose sort key reaches `floor` and whose value reaches `least`."""
    best = float("-inf")
    winner = VOCAB
    for chunk in range(CHUNKS):
        words = _words(seed, position, chunk, True)
        for lane in tl.static_range(4):  # pyright: ignore[reportGeneralTypeIssues]
            token = tl.arange(0, STRIDE) + (chunk * 4 + lane) * STRIDE
            logits = tl.load(logits_row + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
            kept = (token < VOCAB) & (_sort_key(logits) >= floor) & (logits >= least)
            score = tl.math.div_rn(logits, temperature) + _gumbel(words[lane])
            best, winner = _better(best, winner, tl.where(kept, score, float("-inf")), token)
    return winner
