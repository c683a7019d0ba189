"""Encoder attention against a dense float64 one, sequence by sequence."""

import math

import pytest
import torch

LIMIT = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize(
    ("lengths", "heads", "dim"),
    [([1], 12, 32), ([5, 1, 70, 64, 2], 3, 32), ([130], 2, 64), ([3] * 40, 1, 16)],
    ids=["one token", "ragged", "longer than a tile", "many short"],
)
def test_every_token_sees_its_own_sequence_only(run, lengths, heads, dim, dtype):
    qkv = torch.randn(sum(lengths), 3 * heads * dim).to(dtype)
    q, k, v = (part.unflatten(1, (heads, dim)) for part in qkv.chunk(3, dim=1))
    start = torch.tensor([0, *lengths]).cumsum(0).int()
    mixed = run("full_attention", q, k, v, start, dim**-0.5).result
    assert mixed.dtype == dtype
    for first, length in zip(start.tolist(), lengths, strict=False):
        own = [part[first : first + length].double().transpose(0, 1) for part in (q, k, v)]
        weights = torch.softmax(own[0] @ own[1].mT / math.sqrt(dim), -1)
        expected = (weights @ own[2]).transpose(0, 1)
        torch.testing.assert_close(
            mixed[first : first + length].double(), expected, rtol=LIMIT[dtype], atol=LIMIT[dtype]
        )
