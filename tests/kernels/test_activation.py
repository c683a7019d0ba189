import math

import pytest
import torch


def truth(gate_up: torch.Tensor) -> torch.Tensor:
    width = gate_up.shape[1] // 2
    rows = [
        [gate / (1 + math.exp(-gate)) * up for gate, up in zip(row[:width], row[width:], strict=True)]
        for row in gate_up.double().tolist()
    ]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("shape", [(1, 24), (3, 1536), (100, 200), (2, 3000)])
def test_silu_mul(run, shape, dtype, limit):
    gate_up = torch.randn(shape[0], 2 * shape[1]).mul(4).to(dtype)
    result = run("silu_mul", gate_up).result
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), truth(gate_up), rtol=limit, atol=limit)


def test_large_gates_saturate(run):
    gate_up = torch.tensor([[-80.0, 80.0, 3.0, 3.0]])
    assert run("silu_mul", gate_up).result.tolist() == [[pytest.approx(0.0, abs=1e-30), 240.0]]
