import math

import pytest
import torch

BLOCK = 16
LIMIT = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


EPS = 1e-6


def table(positions: int, dim: int, theta: float = 10000.0) -> torch.Tensor:
    angles = torch.arange(positions)[:, None] * theta ** (-torch.arange(0, dim, 2) / dim)
    return torch.cat((angles.cos(), angles.sin()), dim=1).float()


def rotated(heads: torch.Tensor, angles_of: torch.Tensor) -> torch.Tensor:
    """heads [H, D] of one token: pair (i, i + D/2) is a complex number times cos + i sin, in float64."""
    pairs = torch.complex(*heads.double().chunk(2, dim=1)) * torch.complex(*angles_of.double().chunk(2))
    return torch.cat((pairs.real, pairs.imag), dim=1)


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize(
    ("tokens", "q_heads", "kv_heads", "dim"),
    [(1, 9, 3, 64), (20, 9, 3, 64), (3, 8, 2, 64), (3, 4, 4, 64), (3, 32, 8, 128)],
)
def test_rotation_and_cache(run, tokens, q_heads, kv_heads, dim, dtype):
    check(run, tokens, q_heads, kv_heads, dim, dtype, torch.int64)


def test_many_tokens_and_narrow_positions(run):
    check(run, 261, 6, 2, 32, torch.float32, torch.int32)


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize(("tokens", "q_heads", "kv_heads", "dim"), [(20, 8, 2, 64), (70, 6, 2, 32)])
def test_heads_are_normed_first(run, tokens, q_heads, kv_heads, dim, dtype):
    check(run, tokens, q_heads, kv_heads, dim, dtype, torch.int64, normed=True)


def normed_heads(heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = heads.double()
    return (wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()).to(heads.dtype)


def check(run, tokens, q_heads, kv_heads, dim, dtype, position_dtype, normed=False):
    qkv = torch.randn(tokens, q_heads + 2 * kv_heads, dim).to(dtype).flatten(1)
    q, k, v = (part.unflatten(1, (-1, dim)) for part in qkv.split((q_heads * dim, kv_heads * dim, kv_heads * dim), 1))
    cos_sin, positions = table(500, dim), torch.randint(0, 500, (tokens,), dtype=position_dtype)
    blocks = tokens // BLOCK + 3
    cache = torch.full((blocks, 2, 2, BLOCK, kv_heads, dim), torch.nan, dtype=dtype)
    slots = torch.randperm(blocks * BLOCK)[:tokens]
    slots[::5] = -1
    norms = (1 + 0.1 * torch.randn(dim).to(dtype), 1 + 0.1 * torch.randn(dim).to(dtype), EPS) if normed else None
    outcome = run("rope_store", q, k, v, cos_sin, positions, cache[:, 1], slots, norms)
    if norms is not None:
        q, k = normed_heads(q, norms[0]), normed_heads(k, norms[1])
    stored = outcome.args[5]
    for t in range(tokens):
        angles = cos_sin[positions[t]]
        close(outcome.result[t], rotated(q[t], angles))
        if slots[t] >= 0:
            block, offset = divmod(int(slots[t]), BLOCK)
            close(stored[block, 0, offset], rotated(k[t], angles))
            assert torch.equal(stored[block, 1, offset], v[t])
    written = 2 * int((slots >= 0).sum()) * kv_heads * dim
    assert int((~stored.isnan()).sum()) == written, "something else was written"


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    limit = LIMIT[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=limit, atol=limit)


def test_table_convention_is_hugging_faces_half_rotation():
    head = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    quarter = torch.tensor([math.cos(0.5), 1.0, math.sin(0.5), 0.0])
    assert rotated(head, quarter)[0].tolist() == pytest.approx([math.cos(0.5), 0.0, math.sin(0.5), 0.0])
