"""What the sampling kernels share: an integer order of logits, exponential noise, the best of several tokens."""

import triton.language as tl

from stoker.kernels.launch import jit

UNALIGNED = ["temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seed_ptr", "position_ptr"]


@jit
def sort_key(logits):
    """uint32 that orders like the float32 logits."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits | -0x80000000).to(tl.uint32, bitcast=True)


@jit
def better(score, token):
    """The vector's top score and its token; on a tie the lowest token id."""
    top = tl.max(score)
    return top, tl.min(tl.where(score == top, token, 0x7FFFFFFF))


@jit
def philox_words(seed, position, counter):
    """Four vectors of random words for uint32 counters: see `philox.token_words`."""
    zero = counter * 0
    low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    high = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(seed, counter, zero, low, high)


@jit
def exponential(word):
    """-log(1 - u) for the uniform u of `philox.gumbel`, whose noise is minus the logarithm of this.

    Scores are compared as races, where the least exponential / weight wins, which saves a logarithm per token.
    """
    u = tl.minimum(word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 1 - 5.9604644775390625e-08)
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4))))
    return tl.where(u < 0.015625, series, -tl.log(1 - u))
