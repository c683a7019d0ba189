"""Penalties for tokens that were seen, and the tokens a grammar allows: one pass over the rows that ask for it."""

import torch
import triton.language as tl

from stoker.kernels import reference
from stoker.kernels.launch import cdiv, jit

BLOCK = 2048
PROMPT = tl.constexpr(reference.SEEN_IN_PROMPT)


def steer(
    logits: torch.Tensor,
    seen: torch.Tensor,
    slots: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
    allowed: torch.Tensor | None,
) -> None:
    rows, vocab = logits.shape
    bits = seen if allowed is None else allowed
    _steer[(rows, cdiv(vocab, BLOCK))](
        logits, seen, slots, presence, frequency, repetition, bits, logits.stride(0), bits.stride(0),
        vocab, allowed is not None, BLOCK, num_warps=4,
    )  # fmt: skip


@jit(
    do_not_specialize=["bits_stride"],
    do_not_specialize_on_alignment=["lines_ptr", "presence_ptr", "frequency_ptr", "repetition_ptr", "bits_ptr"],
)
def _steer(
    scores_ptr, seen_ptr, lines_ptr, presence_ptr, frequency_ptr, repetition_ptr, bits_ptr, stride, bits_stride,
    VOCAB: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCAB
    place = scores_ptr + row.to(tl.int64) * stride + token
    logits = tl.load(place, mask=inside, other=0)
    slot = tl.load(lines_ptr + row)
    if slot >= 0:
        seen = tl.load(seen_ptr + slot.to(tl.int64) * VOCAB + token, mask=inside, other=0)
        count = seen % PROMPT
        repetition = tl.load(repetition_ptr + row)
        logits = tl.where(seen > 0, tl.where(logits > 0, logits / repetition, logits * repetition), logits)
        logits -= count.to(tl.float32) * tl.load(frequency_ptr + row)
        logits -= tl.where(count > 0, tl.load(presence_ptr + row), 0.0)
    if MASKED:
        word = tl.load(bits_ptr + row.to(tl.int64) * bits_stride + token // 32, mask=inside, other=0)
        # What isn't finite stays, so that it ends the request.
        keep = ((word >> (token % 32)) & 1 != 0) | (logits != logits) | (logits == float("inf"))
        logits = tl.where(keep, logits, float("-inf"))
    tl.store(place, logits, mask=inside)
