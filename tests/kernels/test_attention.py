"""Both attention implementations against per-token float64 loops, with everything they must not read poisoned."""

import math
from typing import NamedTuple

import pytest
import torch

from stoker.kernels.attention_plan import Plan, plan

BLOCK = 16
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
HEADS = [(9, 3, 64), (8, 2, 64), (4, 4, 64), (32, 8, 128)]
# (new tokens, tokens in the cache with them) per sequence
STEPS = {
    "one token": [(1, 1)],
    "whole prompt": [(63, 63)],
    "decode": [(1, 5), (1, 16), (1, 17), (1, 200), (1, 48)],
    "mixed": [(100, 130), (1, 33), (3, 3), (0, 20), (30, 31)],
    "second chunk": [(33, 190)],
    "padding": [(1, 40), (1, 0), (0, 0), (2, 0), (1, 1)],
}


class Case(NamedTuple):
    q: torch.Tensor
    kv_layer: torch.Tensor
    block_table: torch.Tensor
    query_start: torch.Tensor
    context_len: torch.Tensor
    scale: float
    window: int = 0


def build(step, heads, dtype, width=16, spare_rows=0) -> Case:
    """A shuffled cache that is NaN wherever no sequence's context stands; unused table entries point nowhere."""
    q_heads, kv_heads, dim = heads
    lengths, contexts = zip(*step, strict=True)
    needed = [-(-context // BLOCK) for context in contexts]
    order = (torch.randperm(sum(needed)) + 1).split(needed)
    table = torch.full((len(step), width), 1 << 24, dtype=torch.int32)
    cache = torch.full((sum(needed) + 1, 3, 2, BLOCK, kv_heads, dim), torch.nan, dtype=dtype)
    for s, (blocks, context) in enumerate(zip(order, contexts, strict=True)):
        table[s, : len(blocks)] = blocks
        for p in range(context):
            cache[blocks[p // BLOCK], 1, :, p % BLOCK] = torch.randn(2, kv_heads, dim).to(dtype)
    q = torch.randn(sum(lengths) + spare_rows, q_heads, dim).to(dtype)
    q[sum(lengths) :] = torch.nan
    start = torch.tensor([0, *lengths]).cumsum(0).int()
    return Case(q, cache[:, 1], table, start, torch.tensor(contexts).int(), 1 / math.sqrt(dim))


def truth(case: Case) -> torch.Tensor:
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    group = case.q.shape[1] // case.kv_layer.shape[3]
    for s, context in enumerate(case.context_len.tolist()):
        places = [(int(case.block_table[s, p // BLOCK]), p % BLOCK) for p in range(context)]
        cached = [case.kv_layer[block, :, offset].double() for block, offset in places]
        first, stop = case.query_start[s : s + 2].tolist()
        for t in range(first, stop if context else first):
            stands = context - (stop - 1 - t)
            seen = torch.stack(cached[max(0, stands - case.window) if case.window else 0 : stands])
            for head in range(case.q.shape[1]):
                keys, values = seen[:, 0, head // group], seen[:, 1, head // group]
                out[t, head] = torch.softmax(keys @ case.q[t, head].double() * case.scale, 0) @ values
    return out


def forms(case: Case) -> list[Case]:
    """The ways in which a step may be asked for: one of a token per sequence also without query_start."""
    rows = torch.arange(len(case.context_len) + 1, dtype=torch.int32)
    one_each = len(case.q) == len(case.context_len) and case.query_start.equal(rows)
    return [case, case._replace(query_start=None)] if one_each else [case]


def check(run, case: Case) -> None:
    expected = truth(case)
    for form in forms(case):
        result = run("paged_attention", *form).result
        limit = LIMIT[result.dtype]
        torch.testing.assert_close(result.double(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_every_kind_of_step(run, step, dtype):
    check(run, build(step, (9, 3, 64), dtype))


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("heads", HEADS[1:])
@pytest.mark.parametrize("step", [[(1, 5), (1, 100), (1, 17)], [(10, 75), (1, 33), (0, 9), (3, 3)]])
def test_head_shapes(run, step, heads, dtype):
    check(run, build(step, heads, dtype))


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("step", [STEPS["decode"], [(1, 0), (1, 130)], [(1, 600), (1, 127), (1, 300), (1, 128)]])
def test_context_split_over_programs(run, step, dtype):
    case = build(step, (8, 2, 64), dtype, width=40)
    assert plan(len(step), 0, 40 * BLOCK, 8, 2, 64, 2, 132).segments > 1
    check(run, case)


@pytest.mark.parametrize(("segments", "least"), [(2, 1), (2, 9), (4, 3), (8, 4), (16, 1)])
def test_parts_of_every_length(interpreted, segments, least):
    case = build([(1, 600), (1, 40), (1, 0), (1, 333), (1, 256)], (4, 2, 32), torch.float32, width=40)
    chosen = Plan(16, 32, segments, False, 4, 3, least=least)
    result = interpreted("attend", chosen, *case._replace(query_start=None)).result
    torch.testing.assert_close(result.double(), truth(case), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("block_m", [32, 128])
@pytest.mark.parametrize("block_n", [32, 64])
def test_tiles_of_every_height(interpreted, block_m, block_n, dtype):
    case = build([(135, 190), (1, 70)], (4, 1, 32), dtype)
    result = interpreted("attend", Plan(block_m, block_n, 1, True, 8, 3), *case).result
    torch.testing.assert_close(result.double(), truth(case), rtol=LIMIT[dtype], atol=LIMIT[dtype])


@pytest.mark.parametrize("spare_rows", [1, 5, 40])
def test_rows_of_no_sequence_are_zero(run, spare_rows):
    case = build([(3, 20), (1, 9)], (8, 2, 64), torch.float32, spare_rows=spare_rows)
    check(run, case)


def test_more_sequences_than_one_wide_load_counts(run):
    step = [(1, 1 + s % 20) if s % 32 == 0 else (0, 3) for s in range(257)]
    check(run, build(step, (1, 1, 16), torch.float32, width=2))


@pytest.mark.parametrize("width", [16, 40], ids=["whole", "split"])
def test_nan_in_one_context_stays_with_its_sequence(run, width):
    case = build([(1, 150), (1, 140), (1, 30)], (8, 2, 64), torch.float32, width=width)
    case.kv_layer[case.block_table[1, 4], 1, 3] = torch.nan
    expected = truth(case)
    for form in forms(case):
        result = run("paged_attention", *form).result
        assert result[1].isnan().all(), "a broken context must show"
        torch.testing.assert_close(result[::2].double(), expected[::2], rtol=1e-5, atol=1e-5)


def test_large_scores_do_not_overflow(run):
    case = build([(20, 60)], (4, 4, 64), torch.float32)
    check(run, case._replace(q=case.q * 100))


def test_wider_table_and_query_rows_are_strided(run):
    case = build([(1, 20), (1, 40)], (8, 2, 64), torch.float32)
    table = torch.nn.functional.pad(case.block_table, (0, 9))[:, :16]
    q = torch.randn(2, 16, 64)[:, :8]
    check(run, case._replace(block_table=table, q=q))


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("window", [1, 16, 37])
@pytest.mark.parametrize(
    "step", [STEPS["decode"], STEPS["mixed"], STEPS["second chunk"]], ids=["decode", "mixed", "chunk"]
)
def test_sliding_window(run, step, window, dtype):
    check(run, build(step, (4, 2, 32), dtype)._replace(window=window))


@pytest.mark.parametrize("window", [70, 200])
def test_sliding_window_split_over_programs(run, window):
    case = build([(1, 600), (1, 150), (1, 40)], (4, 2, 32), torch.float32, width=40)
    check(run, case._replace(window=window))


@pytest.mark.parametrize("window", [30, 64, 100])
@pytest.mark.parametrize("block_m", [32, 128])
def test_sliding_window_in_tall_tiles(interpreted, block_m, window):
    case = build([(135, 250), (1, 70)], (4, 1, 32), torch.float32)._replace(window=window)
    result = interpreted("attend", Plan(block_m, 32, 1, True, 8, 3), *case).result
    torch.testing.assert_close(result.double(), truth(case), rtol=1e-5, atol=1e-5)
