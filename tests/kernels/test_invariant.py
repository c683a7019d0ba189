"""Operations of batch-invariant steps: right, and the same bits for a row whatever is computed with it."""

import math

import pytest
import torch

from stoker.kernels import matmul, reference
from tests.kernels.test_attention import HEADS, LIMIT, STEPS, Case, build, truth


def product(x, weight, bias):
    return x.double() @ weight.double().T + (0 if bias is None else bias.double())


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("rows", [1, 5, 131])
@pytest.mark.parametrize(("width", "depth"), [(64, 96), (200, 70), (33, 300), (130, 520)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_right_at_every_edge(interpreted, monkeypatch, rows, width, depth, bias, dtype):
    """Of one part, two and four."""
    monkeypatch.setattr(matmul, "LEAST_DEPTH", 128)
    assert matmul.parts_of(width, depth) == {96: 1, 70: 1, 300: 2, 520: 4}[depth]
    x, weight = torch.randn(rows, depth).to(dtype), (torch.randn(width, depth) / math.sqrt(depth)).to(dtype)
    offset = torch.randn(width).to(dtype) if bias else None
    result = interpreted("linear invariant", x, weight, offset).result
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), product(x, weight, offset), rtol=LIMIT[dtype], atol=LIMIT[dtype])


def test_gated_products_are_those_of_gate_and_up(interpreted):
    x, weight = torch.randn(3, 96), torch.randn(144, 96) / 10
    result = interpreted("gated_linear invariant", x, weight).result
    torch.testing.assert_close(result, reference.gated_linear(x, weight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", LIMIT)
def test_a_row_of_a_product_is_the_same_in_every_batch(interpreted, dtype):
    x, weight = torch.randn(200, 96).to(dtype), torch.randn(72, 96).to(dtype)
    whole = interpreted("linear invariant", x, weight).result
    for rows in (*range(1, 40), *range(40, 200, 11), 127, 128, 129, 199):
        assert torch.equal(interpreted("linear invariant", x[:rows], weight).result, whole[:rows]), rows
    for row in range(0, 200, 17):
        assert torch.equal(interpreted("linear invariant", x[row : row + 1], weight).result, whole[row : row + 1]), row
    order = torch.randperm(200)
    assert torch.equal(interpreted("linear invariant", x[order], weight).result, whole[order])


def test_programs_for_parts_of_the_depth_add_up_to_what_one_program_adds(interpreted, monkeypatch):
    """On a smaller device: for 128 rows each tile has a program for either half of the depth, for more rows one for
    both."""
    monkeypatch.setattr(matmul, "PROGRAMS", 8)
    monkeypatch.setattr(matmul, "LEAST_DEPTH", 128)
    x, weight, bias = torch.randn(129, 290).bfloat16(), torch.randn(200, 290).bfloat16(), torch.randn(200).bfloat16()
    assert matmul.parts_of(200, 290) == 2
    whole = interpreted("linear invariant", x, weight, bias).result
    for rows in (1, 128):
        assert torch.equal(interpreted("linear invariant", x[:rows], weight, bias).result, whole[:rows]), rows


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_attention_is_right(interpreted, step, heads, dtype):
    case = build(step, heads, dtype) if heads != HEADS[-1] else build([(3, 20), (1, 40)], heads, dtype)
    result = interpreted("paged_attention invariant", *case).result
    torch.testing.assert_close(result.double(), truth(case), rtol=LIMIT[dtype], atol=LIMIT[dtype])


@pytest.mark.parametrize(
    ("window", "dtype"),
    [(0, torch.float32), (0, torch.bfloat16), (1, torch.bfloat16), (37, torch.bfloat16), (100, torch.float32)],
)
def test_attention_of_a_token_is_the_same_in_chunks_of_every_size(interpreted, dtype, window):
    """Of one prompt: all at once, in chunks, token by token, and beside others."""
    length, other = 150, 210
    case = build([(length, length), (other, other)], (4, 2, 32), dtype)._replace(window=window)
    table, kv_layer = case.block_table, case.kv_layer

    def attended(*steps: tuple[int, int, int]) -> list[torch.Tensor]:
        """Of (sequence, start, stop) in one step."""
        lengths = [stop - start for _, start, stop in steps]
        q = torch.cat([case.q[sequence * length :][start:stop] for sequence, start, stop in steps])
        start = torch.tensor([0, *lengths]).cumsum(0).int()
        ends = torch.tensor([stop for *_, stop in steps]).int()
        own = Case(q, kv_layer, table[[sequence for sequence, *_ in steps]], start, ends, case.scale, window)
        step = own._replace(query_start=None) if set(lengths) == {1} else own
        return list(interpreted("paged_attention invariant", *step).result.split(lengths))

    [whole] = attended((0, 0, length))
    for size in (37, 64):
        chunks = [attended((0, at, min(at + size, length)))[0] for at in range(0, length, size)]
        assert torch.equal(torch.cat(chunks), whole), size
    for token in (0, 15, 16, 64, length - 1):
        here = slice(token, token + 1)
        assert torch.equal(attended((0, token, token + 1))[0], whole[here])
        assert torch.equal(attended((1, 3, 100), (0, token, token + 1), (1, 200, 201))[1], whole[here])
        assert torch.equal(attended((1, 200, 201), (0, token, token + 1))[1], whole[here])


def alone(interpreted, operation, rows, *rest):
    """The results of an operation for every row by itself."""
    return torch.cat(
        [interpreted(operation, *(each[i : i + 1] for each in rows), *rest).result for i in range(len(rows[0]))]
    )


@pytest.mark.parametrize("dtype", LIMIT)
def test_rows_of_elementwise_operations(interpreted, dtype):
    gate_up = torch.randn(70, 3000).to(dtype)
    whole = interpreted("silu_mul invariant", gate_up).result
    assert torch.equal(alone(interpreted, "silu_mul invariant", [gate_up]), whole)
    x, weight = torch.randn(9, 300).to(dtype), torch.randn(300).to(dtype)
    whole = interpreted("rms_norm invariant", x, weight, 1e-5).result
    assert torch.equal(alone(interpreted, "rms_norm invariant", [x], weight, 1e-5), whole)


@pytest.mark.parametrize("normed", [False, True])
def test_rows_of_rotations_and_what_they_store(interpreted, normed):
    tokens, dim = 80, 32
    q, k, v = torch.randn(tokens, 4, dim), torch.randn(tokens, 2, dim), torch.randn(tokens, 2, dim)
    norms = (torch.randn(dim), torch.randn(dim), 1e-6) if normed else None
    cache, table = torch.zeros(8, 2, 16, 2, dim), torch.randn(tokens, dim)
    positions, slots = torch.arange(tokens), torch.randperm(tokens) + 16
    whole = interpreted("rope_store invariant", q, k, v, table, positions, cache, slots, norms)
    for rows in (slice(0, 1), slice(3, 9), slice(20, 79)):
        own = [each[rows] for each in (q, k, v)], positions[rows], slots[rows]
        result, args = interpreted("rope_store invariant", *own[0], table, own[1], cache, own[2], norms)
        assert torch.equal(result, whole.result[rows])
        block, offset = own[2] // 16, own[2] % 16
        assert torch.equal(args[5][block, :, offset], whole.args[5][block, :, offset])


@pytest.mark.parametrize("dtype", LIMIT)
def test_rows_of_adapters(interpreted, dtype):
    tokens, depth, width, rank = 150, 300, 40, 8
    x, y = torch.randn(tokens, depth).to(dtype), torch.randn(tokens, width).to(dtype)
    a, b = torch.randn(2, rank, depth).to(dtype), torch.randn(2, width, rank).to(dtype)
    slots = torch.randint(0, 3, (tokens,)).int()
    whole = interpreted("add_lora invariant", y, x, a, b, slots, width).args[0]
    expected = y.clone()
    reference.add_lora(expected, x, a, b, slots, width)
    torch.testing.assert_close(
        whole.float(), expected.float(), rtol=2e-2, atol=0.3 if dtype == torch.bfloat16 else 1e-3
    )
    for rows in (slice(0, 1), slice(77, 78), slice(10, 90), slice(1, 150)):
        changed = interpreted("add_lora invariant", y[rows], x[rows], a, b, slots[rows], width).args[0]
        assert torch.equal(changed, whole[rows]), rows


@pytest.mark.parametrize("vocab", [7, 4096, 5003])
def test_log_totals(run, vocab):
    logits = torch.randn(5, vocab) * 10
    logits[1, 3:] = -math.inf
    result = run("log_total", logits).result
    torch.testing.assert_close(result.double(), logits.double().logsumexp(-1, keepdim=True), rtol=1e-6, atol=1e-5)
    assert torch.equal(run("log_total", logits[2:3]).result, result[2:3])


def test_broken_logits_have_a_broken_total(run):
    logits = torch.zeros(3, 100)
    logits[1, 5] = math.nan
    assert run("log_total", logits).result.isnan().flatten().tolist() == [False, True, False]
