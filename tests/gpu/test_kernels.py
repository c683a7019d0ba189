"""The Triton kernels on a GPU at the sizes of an 8B Llama: against float64, in CUDA graphs, without recompiling."""

import math
from typing import Any, NamedTuple

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore:.*[Dd]eterminis"),
]

DTYPES = [torch.bfloat16, torch.float32]
LIMIT = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
Q_HEADS, KV_HEADS, DIM, HIDDEN, INTERMEDIATE, VOCAB = 32, 8, 128, 4096, 14336, 128256
BLOCK = 16


@pytest.fixture(scope="module")
def ops():
    from stoker.kernels import ops

    return ops


@pytest.fixture(autouse=True)
def poisoned_allocations():
    """In torch's deterministic mode fresh tensors are NaN, so an output that is never written shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class Case(NamedTuple):
    q: torch.Tensor
    kv_layer: torch.Tensor
    block_table: torch.Tensor
    query_start: torch.Tensor
    context_len: torch.Tensor
    scale: float


def build(lengths, contexts, dtype=torch.bfloat16, heads=(Q_HEADS, KV_HEADS, DIM), rows=None) -> Case:
    """A shuffled cache that is NaN behind every context; rows past the sequences are NaN."""
    q_heads, kv_heads, dim = heads
    needed = [-(-context // BLOCK) for context in contexts]
    order = (torch.randperm(sum(needed)) + 1).split(needed)
    table = torch.zeros(len(contexts), max(*needed, 1), dtype=torch.int32)
    cache = torch.randn(sum(needed) + 1, 2, 2, BLOCK, kv_heads, dim, dtype=dtype, device="cuda")
    cache[0] = torch.nan
    for s, (blocks, context) in enumerate(zip(order, contexts, strict=True)):
        table[s, : len(blocks)] = blocks
        if context % BLOCK:
            cache[blocks[-1], :, :, context % BLOCK :] = torch.nan
    q = torch.randn(rows or sum(lengths), q_heads, dim, dtype=dtype, device="cuda")
    q[sum(lengths) :] = torch.nan
    start = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    return Case(q, cache[:, 1], table.cuda(), start, torch.tensor(contexts).int().cuda(), 1 / math.sqrt(dim))


def truth(case: Case) -> torch.Tensor:
    """Dense float64 attention, one sequence and KV head at a time."""
    out = torch.zeros(case.q.shape, dtype=torch.float64, device="cuda")
    starts, group = case.query_start.tolist(), case.q.shape[1] // case.kv_layer.shape[3]
    for s, context in enumerate(case.context_len.tolist()):
        rows, length = slice(starts[s], starts[s + 1]), starts[s + 1] - starts[s]
        if not (context and length):
            continue
        cached = case.kv_layer[case.block_table[s, : -(-context // BLOCK)].long()]
        keys, values = cached.transpose(0, 1).flatten(1, 2)[:, :context].double()
        hidden = torch.arange(context, device="cuda") > torch.arange(context - length, context, device="cuda")[:, None]
        for head in range(keys.shape[1]):
            q = case.q[rows, head * group : (head + 1) * group].double().transpose(0, 1)
            scores = (q @ keys[:, head].T * case.scale).masked_fill(hidden, -math.inf)
            out[rows, head * group : (head + 1) * group] = (scores.softmax(-1) @ values[:, head]).transpose(0, 1)
    return out


def forms(case: Case) -> list[tuple[torch.Tensor | float | None, ...]]:
    """The ways in which a step may be asked for: one of a token per sequence also without query_start."""
    rows = torch.arange(len(case.context_len) + 1, device="cuda")
    one_each = len(case.q) == len(case.context_len) and torch.equal(case.query_start, rows.int())
    return [case, (*case[:3], None, *case[4:])] if one_each else [case]


def check(ops, case: Case) -> None:
    limit = LIMIT[case.q.dtype]
    expected = truth(case)
    for form in forms(case):
        torch.testing.assert_close(ops.paged_attention(*form).double(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 2, 7, 64, 256])
def test_decode(ops, batch, dtype):
    contexts = torch.randint(1, 8193 if batch <= 64 else 2049, (batch,)).tolist()
    check(ops, build([1] * batch, contexts, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "contexts"),
    [
        ([4096], [4096]),
        ([1000], [8000]),
        ([700, 1, 1, 300, 63, 0], [700, 4000, 17, 900, 4096, 5]),
        ([513] + [1] * 100, [2000] + list(range(1, 3001, 30))),
        ([5] * 64, list(range(10, 650, 10))),
    ],
    ids=["prompt", "chunk", "mixed", "chunk and decodes", "few tokens each"],
)
def test_prefill_and_mixed(ops, lengths, contexts, dtype):
    check(ops, build(lengths, contexts, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 2, 64), (4, 4, 64), (28, 4, 128), (8, 1, 256), (6, 2, 32)])
def test_other_heads(ops, heads, dtype):
    check(ops, build([1, 1, 1, 1], [1, 30, 300, 3000], dtype, heads))
    check(ops, build([200, 1, 33], [200, 500, 90], dtype, heads))


@pytest.mark.parametrize("batch", [4, 64])
def test_padding_sequences_and_rows_come_out_zero(ops, batch):
    lengths, contexts = [1] * batch, [700, 0] * (batch // 2)
    check(ops, build(lengths, contexts))
    check(ops, build([1] * (batch // 2) + [0] * (batch // 2), contexts[::-1], rows=batch))


def test_nan_in_one_context_stays_with_its_sequence(ops):
    case = build([1, 1, 200, 1], [1000, 2000, 400, 30])
    case.kv_layer[case.block_table[1, 3], 1, 3] = torch.nan
    result = ops.paged_attention(*case)
    assert result[1].isnan().all()
    kept = torch.ones(len(result), dtype=torch.bool)
    kept[1] = False
    torch.testing.assert_close(result[kept].double(), truth(case)[kept], rtol=2e-2, atol=2e-2)


def test_block_offsets_beyond_two_to_the_31(ops):
    """A cache of more than 2^31 elements: 32-bit offsets would wrap."""
    blocks = 2**31 // (2 * 2 * BLOCK * KV_HEADS * DIM) + 100
    cache = torch.zeros(blocks, 2, 2, BLOCK, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    q, k, v = (torch.randn(1, heads, DIM, dtype=torch.bfloat16, device="cuda") for heads in (32, 8, 8))
    flat = torch.cat((torch.ones(4, DIM // 2), torch.zeros(4, DIM // 2)), 1).cuda()
    zero, slot = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.tensor([(blocks - 1) * BLOCK], device="cuda")
    q = ops.rope_store(q, k, v, flat, zero, cache[:, 1], slot)
    table = torch.tensor([[blocks - 1]], dtype=torch.int32, device="cuda")
    start, context = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 1], [1]))
    mixed = ops.paged_attention(q, cache[:, 1], table, start, context, 1.0)
    torch.testing.assert_close(mixed, v.repeat_interleave(4, dim=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 64, 256, 257, 2048])
def test_rope_store(ops, tokens, dtype):
    width = Q_HEADS + 2 * KV_HEADS
    qkv = torch.randn(tokens, width, DIM, dtype=dtype, device="cuda")
    q, k, v = qkv.split((Q_HEADS, KV_HEADS, KV_HEADS), dim=1)
    angles = torch.rand(9000, DIM // 2, device="cuda") * 6
    positions = torch.randint(0, 9000, (tokens,), device="cuda")
    blocks = tokens // BLOCK + 2
    cache = torch.full((blocks, 2, 2, BLOCK, KV_HEADS, DIM), torch.nan, dtype=dtype, device="cuda")
    slots = torch.randperm(blocks * BLOCK, device="cuda")[:tokens]
    slots[1::5] = -1
    q_rotated = ops.rope_store(q, k, v, torch.cat((angles.cos(), angles.sin()), 1), positions, cache[:, 1], slots)
    turn = torch.complex(angles.double().cos(), angles.double().sin())[positions, None]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(*x.double().chunk(2, dim=-1)) * turn
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    kept = slots >= 0
    stored = cache[slots[kept] // BLOCK, 1, :, slots[kept] % BLOCK]
    limit = LIMIT[dtype]
    torch.testing.assert_close(q_rotated.double(), rotated(q), rtol=limit, atol=limit)
    torch.testing.assert_close(stored[:, 0].double(), rotated(k)[kept], rtol=limit, atol=limit)
    assert torch.equal(stored[:, 1], v[kept])
    assert int((~cache.isnan()).sum()) == int(kept.sum()) * 2 * KV_HEADS * DIM


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 256, 4096])
def test_norms_and_activation(ops, tokens, dtype):
    limit = 2e-6 if dtype == torch.float32 else 8e-3
    x, residual = torch.randn(2, tokens, HIDDEN, dtype=dtype, device="cuda").unbind()
    weight = torch.randn(HIDDEN, dtype=dtype, device="cuda")

    def norm(rows: torch.Tensor) -> torch.Tensor:
        wide = rows.double()
        return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5).double(), norm(x), rtol=limit, atol=limit)
    total = x + residual
    normed, updated = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(updated, total) and updated.data_ptr() == residual.data_ptr()
    torch.testing.assert_close(normed.double(), norm(total), rtol=limit, atol=limit)
    gate_up = torch.randn(tokens, 2 * INTERMEDIATE, dtype=dtype, device="cuda")
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = gate * gate.sigmoid() * up
    torch.testing.assert_close(ops.silu_mul(gate_up).double(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 9])
@pytest.mark.parametrize(
    ("width", "depth"), [(6144, 4096), (4096, 14336), (VOCAB, 4096), (960, 576), (3584, 2560), (1000, 584)]
)
def test_linear(ops, rows, width, depth, bias):
    x, weight = (torch.randn(n, depth, dtype=torch.bfloat16, device="cuda") for n in (rows, width))
    offset = torch.randn(width, dtype=torch.bfloat16, device="cuda") if bias else None
    expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    result = ops.linear(x, weight, offset)
    assert result.shape == (rows, width) and result.dtype == torch.bfloat16
    assert float((result.double() - expected).norm() / expected.norm()) < 5e-3
    assert torch.equal(result, ops.linear(x, weight, offset)), "the same product twice has the same bits"


def sampling_params(rows: int) -> tuple[torch.Tensor, ...]:
    """Every combination of filters, by row."""
    s = torch.arange(rows)
    temperature = torch.tensor([0.0, 0.6, 1.0, 1.5])[s % 4]
    top_k = torch.tensor([0, 50, 1, 2000], dtype=torch.int32)[s // 4 % 4]
    top_p, min_p = torch.tensor([1.0, 0.9, 0.5])[s // 16 % 3], torch.tensor([0.0, 0.05])[s // 48 % 2]
    return temperature, top_k, top_p, min_p, s * 1_000_003 - 7, s * 17


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [49152, VOCAB])
def test_sampler_draws_the_references_tokens(ops, vocab, dtype):
    rows = 96
    logits = (torch.randn(rows, vocab) * 3).to(dtype)
    params = sampling_params(rows)
    logits[5, 1000], logits[6, 7], logits[7] = torch.nan, torch.inf, -torch.inf
    expected = ops.sample(logits, *params)
    drawn = ops.sample(logits.cuda(), *(p.cuda() for p in params)).cpu()
    assert drawn[5:8].tolist() == [-1, -1, -1]
    # Rounding may turn a near tie, or move a token across the edge of a nucleus: very rarely.
    assert int((drawn != expected).sum()) <= 1, (drawn, expected)


@pytest.mark.parametrize("spread", [0.0, 0.2, 30.0], ids=["equal", "flat", "steep"])
def test_sampler_filters_any_distribution(ops, spread):
    rows = 24
    logits = (torch.randn(rows, VOCAB) * spread).bfloat16()
    params = [p.roll(-1) for p in sampling_params(96)]
    chosen = (params[0] > 0).nonzero().squeeze(1)[: 3 * rows : 3]
    params = [p[chosen] for p in params]
    drawn = ops.sample(logits.cuda(), *(p.cuda() for p in params)).cpu()
    assert int((drawn != ops.sample(logits, *params)).sum()) <= 1
    alone = torch.cat([ops.sample(logits[s : s + 1].cuda(), *(p[s : s + 1].cuda() for p in params)) for s in range(9)])
    assert torch.equal(alone.cpu(), drawn[:9]), "a row's token depends on its batch"


@pytest.mark.parametrize("row", [(1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.1)])
def test_sampler_frequencies(ops, row):
    draws, temperature, top_k, top_p, min_p = 20_000, *row
    logits = torch.linspace(2, -2, 12, device="cuda")
    ones = torch.ones(draws, device="cuda")
    position = torch.arange(draws, device="cuda")
    tokens = ops.sample(
        logits.expand(draws, -1).contiguous(), ones * temperature, (ones * top_k).int(), ones * top_p, ones * min_p,
        torch.full_like(position, 99), position,
    )  # fmt: skip
    p = (logits.double() / temperature).softmax(0)
    alive = (p >= min_p * p.max()) & (torch.arange(12, device="cuda") < (top_k or 12)) & (p.cumsum(0) - p < top_p)
    expected = p * alive / (p * alive).sum() * draws
    seen = torch.bincount(tokens, minlength=12).double()
    assert (seen[~alive] == 0).all()
    assert float(((seen - expected)[alive].square() / expected[alive]).sum()) < 40


def captured(step) -> tuple[torch.cuda.CUDAGraph, Any]:
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


@pytest.mark.parametrize("rows", [8, 300])
def test_a_captured_step_replays_with_other_lengths(ops, rows):
    """One graph for decode and for a mixed step of the same size: only the contents of its inputs change."""
    case = build([rows], [rows], rows=rows)
    sequences, width = 8, 600
    blocks = sequences * width + 1
    cache = torch.randn(blocks, 2, 2, BLOCK, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")[:, 1]
    table = (torch.randperm(blocks - 1, device="cuda")[: sequences * width] + 1).view(sequences, width).int()
    start, context = torch.zeros(sequences + 1, device="cuda").int(), torch.zeros(sequences, device="cuda").int()
    graph, result = captured(lambda: ops.paged_attention(case.q, cache, table, start, context, case.scale))
    for _ in range(5):
        lengths = torch.distributions.Multinomial(rows, torch.ones(sequences)).sample().int()
        lengths[0] -= lengths[0] // 2
        contexts = lengths + torch.randint(0, 9000, (sequences,))
        start.copy_(torch.cat((torch.zeros(1), lengths.cumsum(0))).int())
        context.copy_(contexts.int())
        torch.nn.init.normal_(case.q)
        graph.replay()
        changed = Case(case.q, cache, table, start, context, case.scale)
        torch.testing.assert_close(result.double(), truth(changed), rtol=2e-2, atol=2e-2)


def test_the_sampler_replays_with_other_parameters(ops):
    logits = torch.randn(96, VOCAB, device="cuda")
    params = [p.cuda() for p in sampling_params(96)]
    graph, tokens = captured(lambda: ops.sample(logits, *params))
    for _ in range(3):
        torch.nn.init.normal_(logits, std=3)
        params[4] += 1
        params[0].copy_(params[0].roll(1))
        graph.replay()
        again = tokens.clone()
        assert torch.equal(again, ops.sample(logits, *params))


def test_nothing_compiles_after_warm_up(ops):
    """Other lengths, batch sizes and offsets into a buffer reuse the variants that a warm-up of each plan has made."""
    from stoker.kernels.launch import origins

    weight = torch.randn(HIDDEN, HIDDEN, dtype=torch.bfloat16, device="cuda")

    def step(lengths: list[int], contexts: list[int], shift: int) -> None:
        case = build(lengths, contexts)
        # Views at odd offsets, as a caller that slices one buffer makes them.
        start = torch.nn.functional.pad(case.query_start, (shift, 0))[shift:]
        context = torch.nn.functional.pad(case.context_len, (shift, 0))[shift:]
        where = None if lengths[0] == 1 else start
        q = ops.paged_attention(case.q, case.kv_layer, case.block_table, where, context, case.scale)
        x = q.flatten(1)
        ops.add_rms_norm(x, x.clone(), x[0].clone(), 1e-5)
        ops.silu_mul(x)
        ops.linear(x, weight)
        positions = torch.arange(len(q) + shift, device="cuda")[shift:]
        k, table = q[:, :KV_HEADS].contiguous(), torch.zeros(9000, DIM, device="cuda")
        ops.rope_store(q, k, k, table, positions, case.kv_layer, positions - positions)
        params = [torch.nn.functional.pad(p, (shift, 0)).cuda()[shift:] for p in sampling_params(len(lengths))]
        ops.sample(torch.randn(len(lengths), 5000, device="cuda"), *params)

    for batch in (1, 2, 4, 8, 16, 32, 64, 128):
        step([1] * batch, [8192] * batch, 0)
    step([2, 2], [40, 50], 0)
    step([2048], [2048], 0)
    warm = origins()
    for round_ in range(6):
        batch = 1 + 11 * round_
        contexts = torch.randint(200, 4000, (batch,)).tolist()
        contexts[0] = 8192
        step([1] * batch, contexts, round_)
        step([3] * batch, contexts, round_)
        step([1000 + 37 * round_], [4096 + round_], round_)
    assert origins() == warm
