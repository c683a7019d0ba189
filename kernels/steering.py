"""For rows that ask: penalties for tokens that were seen, the tokens a grammar allows, and what makes log-probabilities
of logits. One program goes through a whole row for those: their sum has one order, however many rows there are."""

import torch
import triton.language as tl
from torch import Tensor

from stoker.kernels import reference
from stoker.kernels.launch import cdiv, jit

BLOCK = 2048
PROMPT = tl.constexpr(reference.SEEN_IN_PROMPT)


def steer(
    logits: Tensor,
    seen: Tensor,
    slots: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    allowed: Tensor | None,
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


def log_total(logits: Tensor) -> Tensor:
    out = torch.empty((len(logits), 1), dtype=torch.float32, device=logits.device)
    _log_total[(len(logits),)](logits, out, logits.stride(0), logits.shape[1], 2 * BLOCK, num_warps=8)
    return out


@jit(do_not_specialize_on_alignment=["scores_ptr"])
def _log_total(scores_ptr, total_ptr, stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.arange(0, BLOCK)
    place = scores_ptr + tl.program_id(0).to(tl.int64) * stride + token
    highest, total = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    for base in range(0, VOCAB, BLOCK):
        highest = tl.maximum(highest, tl.load(place + base, mask=base + token < VOCAB, other=float("-inf")))
    peak = tl.max(highest)
    for base in range(0, VOCAB, BLOCK):
        total += tl.exp(tl.load(place + base, mask=base + token < VOCAB, other=float("-inf")) - peak)
    tl.store(total_ptr + tl.program_id(0), peak + tl.log(tl.sum(total)))
