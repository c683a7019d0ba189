"""Both samplers against a plain float64 sampler with a Philox of its own, and against the distribution they promise."""

import math
from typing import NamedTuple

import pytest
import torch

from stoker.kernels import reference


class Row(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0


def columns(rows: list[Row]) -> tuple[torch.Tensor, ...]:
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int64)
    return tuple(torch.tensor(c, dtype=d) for c, d in zip(zip(*rows, strict=True), dtypes, strict=True))


def philox_word(seed: int, position: int, token: int) -> int:
    seed, position, mask = seed % 2**64, position % 2**64, 2**32 - 1
    counter = [token // 4096 * 1024 + token % 1024, 0, position & mask, position >> 32]
    key = [seed & mask, seed >> 32]
    for _ in range(10):
        even, odd = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [odd >> 32 ^ counter[1] ^ key[0], odd & mask, even >> 32 ^ counter[3] ^ key[1], even & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return counter[token // 1024 % 4]


def kept(logits: list[float], row: Row) -> list[int]:
    """Tokens that survive the filters, ties with the last one included."""
    order = sorted(range(len(logits)), key=lambda t: -logits[t])
    weight = [math.exp((x - logits[order[0]]) / row.temperature) for x in logits]
    if 0 < row.top_k < len(order):
        order = [t for t in order if logits[t] >= logits[order[row.top_k - 1]]]
    if row.top_p < 1:
        mass, total, count = 0.0, sum(weight[t] for t in order), 0
        while mass < row.top_p * total and count < len(order):
            mass, count = mass + weight[order[count]], count + 1
        order = [t for t in order if logits[t] >= logits[order[max(count, 1) - 1]]]
    return [t for t in order if weight[t] >= row.min_p * (1 - 1e-6)]


def scores(logits: list[float], row: Row) -> dict[int, float]:
    """The score of every token that may be drawn: the highest wins."""
    if row.temperature == 0:
        return dict(enumerate(logits))
    tokens = kept(logits, row)
    uniform = {t: 1 - (philox_word(row.seed, row.position, t) + 0.5) / 2**32 for t in tokens}
    return {t: logits[t] / row.temperature - math.log(-math.log(uniform[t])) for t in tokens}


def check(run, logits: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    tokens = run("sample", logits, *columns(rows)).result
    assert tokens.dtype == torch.int64
    for values, row, token in zip(logits.double().tolist(), rows, tokens.tolist(), strict=True):
        allowed = scores(values, row)
        assert token in allowed, row
        assert allowed[token] >= max(allowed.values()) - 1e-4, row
    return tokens


MIXED = [
    Row(temperature=0.0),
    Row(temperature=0.7, seed=1),
    Row(top_k=50, seed=2, position=9),
    Row(top_k=1, seed=3),
    Row(top_p=0.8, seed=2**62 + 11, position=2**33),
    Row(top_k=20, top_p=0.9, min_p=0.02, temperature=1.5, seed=-5, position=1),
    Row(min_p=0.1, seed=6),
    Row(top_p=0.0, seed=7),
    Row(top_k=10**6, seed=8),
]


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(1, torch.float32), (7, torch.float16), (1024, torch.bfloat16), (5000, torch.float32), (5000, torch.bfloat16)],
)
def test_every_filter(run, vocab, dtype):
    check(run, (torch.randn(len(MIXED), vocab) * 3).to(dtype), MIXED)


FLAT = [Row(top_p=0.9, seed=1), Row(top_k=3000, seed=2), Row(top_k=3000, top_p=0.5, seed=3), Row(min_p=0.01, seed=4)]


@pytest.mark.parametrize(
    ("spread", "dtype"),
    [(0.0, torch.float32), (0.1, torch.bfloat16), (1.0, torch.float32)],
    ids=["equal", "flat", "normal"],
)
def test_more_survivors_than_a_list_holds(run, spread, dtype):
    check(run, (torch.randn(len(FLAT), 9000) * spread).to(dtype), FLAT)


def test_survivors_crowded_in_one_group(run):
    logits = torch.randn(3, 9000) * 0.1
    logits[:, 4096:4800:2] += 20
    check(run, logits, [Row(top_k=100, seed=1), Row(top_p=0.95, seed=2), Row(top_k=300, top_p=0.3, min_p=0.01, seed=3)])


def test_negative_and_huge_logits(run):
    rows = [Row(top_k=30, seed=1), Row(top_p=0.9, seed=2), Row(top_p=0.9, temperature=50.0, seed=3)]
    check(run, torch.randn(3, 5000) * 2 - 40, rows)
    check(run, torch.randn(3, 5000) * 1e4, rows)


def test_ties_with_the_last_kept_token_stay(run):
    logits = torch.tensor([[3.0, 2.0, 2.0, -1.0]]).repeat(9, 1)
    tokens = check(run, logits, [Row(top_k=2, seed=s) for s in range(9)])
    assert set(tokens.tolist()) == {0, 1, 2}


def test_greedy_takes_the_lowest_of_equal_tokens(run):
    logits = torch.zeros(2, 3000)
    logits[1, [1500, 2900]] = 1.0
    assert run("sample", logits, *columns([Row(temperature=0.0)] * 2)).result.tolist() == [0, 1500]


@pytest.mark.parametrize("row", [Row(temperature=0.0), Row(), Row(top_k=5), Row(top_p=0.5)])
def test_broken_rows_give_minus_one_and_hurt_nobody(run, row):
    logits = torch.randn(5, 1500)
    clean = run("sample", logits[1::3], *columns([row] * 2)).result
    logits[0, 700], logits[2, 0], logits[3] = torch.nan, torch.inf, -torch.inf
    tokens = run("sample", logits, *columns([row] * 5)).result
    assert tokens[[0, 2, 3]].tolist() == [-1, -1, -1]
    assert torch.equal(tokens[1::3], clean)


@pytest.mark.parametrize("row", [Row(temperature=0.0), Row(temperature=2.0), Row(top_k=40), Row(top_p=0.99)])
def test_forbidden_tokens_are_never_drawn(run, row):
    logits = torch.full((3, 1500), -torch.inf)
    logits[:, [17, 1400]] = torch.tensor([0.0, 0.1])
    tokens = run("sample", logits, *columns([row._replace(seed=s) for s in range(3)])).result
    assert set(tokens.tolist()) <= {17, 1400}


def test_a_rows_token_does_not_depend_on_its_batch(run):
    rows = MIXED[:6]
    logits = torch.randn(len(rows), 1100) * 2
    together = run("sample", logits, *columns(rows)).result
    for s in range(0, len(rows), 2):
        alone = run("sample", logits[s : s + 1], *columns(rows[s : s + 1])).result
        assert alone.tolist() == together[s : s + 1].tolist()


def test_rows_of_a_wider_tensor(run):
    wide = torch.randn(3, 900)
    rows = [Row(temperature=0.0), Row(seed=4), Row(top_k=4, seed=4)]
    check(run, wide[:, :700], rows)


def test_tiny_temperature_is_the_argmax(run):
    logits = torch.randn(4, 3000)
    tokens = run("sample", logits, *columns([Row(temperature=t) for t in (1e-4, 1e-5, 1e-6, 0.0)])).result
    assert torch.equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("row", [Row(), Row(temperature=0.5), Row(top_k=4), Row(top_p=0.7), Row(min_p=0.2)])
def test_frequencies_match_the_filtered_distribution(row):
    draws, logits = 20_000, torch.tensor([1.0, 0.5, 0.0, 2.0, -1.0, 1.5, -3.0, 0.2])
    rows = torch.ones(draws)
    tokens = reference.sample(
        logits.expand(draws, -1), rows * row.temperature, (rows * row.top_k).int(), rows * row.top_p,
        rows * row.min_p, torch.full((draws,), 42), torch.arange(draws),
    )  # fmt: skip
    alive = kept(logits.tolist(), row)
    weight = torch.zeros(len(logits), dtype=torch.float64)
    weight[alive] = (logits[alive].double() / row.temperature).exp()
    expected = weight / weight.sum() * draws
    seen = torch.bincount(tokens, minlength=len(logits)).double()
    assert (seen[expected == 0] == 0).all()
    likely = expected > 0
    chi_square = float(((seen - expected)[likely].square() / expected[likely]).sum())
    assert chi_square < 30, (seen, expected)
