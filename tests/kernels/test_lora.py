"""Low-rank adapters, row by row in float64."""

import math

import pytest
import torch

ADAPTERS = 3


def layer(rank: int, depth: int, widths: tuple[int, ...], dtype: torch.dtype, tokens: int):
    """y, x, a, b: of three adapters that lie in one block of memory each, as the engine has them."""
    lines, columns = len(widths) * rank, sum(widths)
    memory = torch.randn(ADAPTERS, lines * depth + columns * rank).div(math.sqrt(rank)).to(dtype)
    a = memory[:, : lines * depth].unflatten(1, (lines, depth))
    b = memory[:, lines * depth :].unflatten(1, (columns, rank))
    return torch.randn(tokens, columns).to(dtype), torch.randn(tokens, depth).to(dtype), a, b


def truth(y, x, a, b, slots, widths):
    """In float64 throughout."""
    expected, rank = y.double(), b.shape[2]
    for row, slot in enumerate(slots.tolist()):
        if slot:
            for part, own in enumerate(b[slot - 1].double().split(widths)):
                middle = a[slot - 1, part * rank : (part + 1) * rank].double() @ x[row].double()
                start = sum(widths[:part])
                expected[row, start : start + widths[part]] += own @ middle
    return expected


def check(run, widths, rank, depth, slots, dtype):
    limit = {"rtol": 2e-2, "atol": 0.02 * math.sqrt(depth)} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    named = torch.tensor(slots, dtype=torch.int32)
    y, x, a, b = layer(rank, depth, widths, dtype, len(slots))
    changed = run("add_lora", y, x, a, b, named, widths[0]).args[0]
    assert changed.dtype == dtype
    torch.testing.assert_close(changed.double(), truth(y, x, a, b, named, widths), **limit)
    assert torch.equal(changed[named == 0], y[named == 0]), "rows without an adapter stay as they are, bit by bit"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [8, 16, 24, 64])
@pytest.mark.parametrize("widths", [(40,), (64, 16, 16), (136, 136)])
def test_every_row_has_its_own_adapter(run, widths, rank, dtype):
    check(run, widths, rank, 48, [2, 0, 1, 3, 3, 0, 2, 1, 1, 2, 0, 0, 3, 1, 2, 3, 1, 0, 2], dtype)


@pytest.mark.parametrize("depth", [7, 130, 1000])
def test_odd_depths_are_cut_into_parts(run, depth):
    check(run, (33, 5, 5), 8, depth, [1, 0, 3], torch.float32)


@pytest.mark.parametrize("slots", [[0], [3], [0] * 40, [2] * 40, [1] * 20 + [0] * 7 + [3] * 13])
def test_batches_of_none_of_one_and_of_segments(run, slots):
    check(run, (24, 24), 16, 32, slots, torch.float32)


@pytest.mark.parametrize("quarters", [50, 300])
def test_many_rows_take_larger_tiles(run, quarters):
    check(run, (20, 12, 12), 8, 24, [0, 1, 1, 2] * quarters, torch.float32)


def test_a_neighbours_broken_adapter_or_input_stays_its_own(run):
    y, x, a, b = layer(16, 32, (24,), torch.float32, 3)
    b[1], x[2] = math.nan, math.inf
    slots = torch.tensor([1, 2, 3], dtype=torch.int32)
    changed = run("add_lora", y, x, a, b, slots, 24).args[0]
    torch.testing.assert_close(changed[:1].double(), truth(y[:1], x[:1], a, b, slots[:1], (24,)), rtol=1e-4, atol=1e-4)
    assert changed[1].isnan().all() and not changed[2].isfinite().any()
