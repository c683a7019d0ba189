"""Penalties and allowed tokens, token by token in float64."""

import math

import torch

from stoker.kernels.reference import SEEN_IN_PROMPT

VOCAB = 2500
PENALTIES = [(0.0, 0.0, 1.0), (0.5, 0.0, 1.0), (0.0, -0.7, 1.0), (0.0, 0.0, 1.3), (1.1, 0.4, 0.8)]


def columns(rows: list[tuple[float, float, float]]) -> list[torch.Tensor]:
    return [torch.tensor(column) for column in zip(*rows, strict=True)]


def seen_table(slots: int) -> torch.Tensor:
    seen = torch.randint(0, 4, (slots, VOCAB)) * (torch.rand(slots, VOCAB) < 0.2)
    return (seen + SEEN_IN_PROMPT * (torch.rand(slots, VOCAB) < 0.2)).int()


def penalised(logit: float, seen: int, penalty: tuple[float, float, float]) -> float:
    presence, frequency, repetition = penalty
    count = seen % SEEN_IN_PROMPT
    if seen:
        logit = logit / repetition if logit > 0 else logit * repetition
    return logit - count * frequency - (presence if count else 0.0)


def test_penalties(run):
    logits, seen, slots = torch.randn(5, VOCAB) * 3, seen_table(6), torch.tensor([3, -1, 0, 5, 2]).int()
    changed = run("steer", logits, seen, slots, *columns(PENALTIES), None).args[0]
    for row in range(5):
        own = seen[slots[row]].tolist() if slots[row] >= 0 else [0] * VOCAB
        expected = [penalised(x, s, PENALTIES[row]) for x, s in zip(logits[row].double().tolist(), own, strict=True)]
        torch.testing.assert_close(
            changed[row].double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6
        )
    assert torch.equal(changed[1], logits[1])


def test_only_allowed_tokens_stay_and_nothing_broken_is_hidden(run):
    logits, allowed = torch.randn(3, VOCAB), torch.rand(3, VOCAB) < 0.1
    allowed[1] = True
    allowed[2, [7, 8]] = False
    logits[2, 7], logits[2, 8] = math.nan, math.inf
    words = torch.zeros(3, -(-VOCAB // 32), dtype=torch.int64)
    for token in range(VOCAB):
        words[:, token // 32] |= allowed[:, token].long() << (token % 32)
    none = columns([(0.0, 0.0, 1.0)] * 3)
    bits = words.where(words < 2**31, words - 2**32).int()
    changed = run("steer", logits, seen_table(1), torch.full((3,), -1).int(), *none, bits).args[0]
    kept = allowed.clone()
    kept[2, [7, 8]] = True
    assert torch.equal(changed[kept].nan_to_num(nan=5.5), logits[kept].nan_to_num(nan=5.5))
    assert (changed[~kept] == -math.inf).all()
