"""Counter-based random bits for sampling, in plain torch integers.

A token's noise is a pure function of (seed, position, token id), so a request draws the same tokens alone, in any
batch, after a preemption or on another device.
"""

import torch
from torch import Tensor

# Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF

# One Philox call gives four words. Token t takes word (t // STRIDE) % 4 of the call whose counter is
# (t // (4 * STRIDE)) * STRIDE + t % STRIDE: a kernel that owns 4 * STRIDE neighbouring tokens needs STRIDE calls, and
# its loads stay contiguous.
STRIDE = 1024

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four 32-bit words per element (held in int64) from a 128-bit counter and a 64-bit key, all broadcastable."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # The 64-bit products wrap in int64; the wrapped bits are the right ones.
        even, odd = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = ((odd >> 32) & MASK) ^ c1 ^ k0, odd & MASK
        c2, c3 = ((even >> 32) & MASK) ^ c3 ^ k1, even & MASK
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3


def token_words(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Random words int64[S, vocab] in [0, 2^32) for seeds i64[S] at positions i64[S]."""
    groups = -(-vocab // (4 * STRIDE))
    group, place = torch.arange(groups, device=seed.device), torch.arange(min(STRIDE, vocab), device=seed.device)
    counter = (group[:, None] * STRIDE + place)[None]
    seed, position = seed.view(-1, 1, 1), position.view(-1, 1, 1)
    zero = torch.zeros_like(counter)
    words = philox((counter, zero, position & MASK, (position >> 32) & MASK), (seed & MASK, (seed >> 32) & MASK))
    return torch.stack(words, dim=2).reshape(seed.shape[0], -1)[:, :vocab]


def gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel noise float32 from random words: -log(E) with E exponential.

    E = -log(1 - u) is expanded around 0 so that the large values, which decide the draw, keep full precision.
    """
    u = (words.to(torch.float32) * 2.0**-32 + 2.0**-33).clamp(max=1 - 2.0**-24)
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4))))
    return -torch.where(u < 2.0**-6, series, -torch.log(1 - u)).log()
