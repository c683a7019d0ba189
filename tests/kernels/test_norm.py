import pytest
import torch

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
SHAPES = [(1, 64), (3, 576), (63, 100), (2, 4096)]


def truth(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows = [row / torch.sqrt((row * row).sum() / row.numel() + eps) for row in x.double()]
    return torch.stack(rows) * weight.double()


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    limit = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(run, shape, dtype):
    x, weight = torch.randn(shape).mul(3).to(dtype), torch.randn(shape[1]).to(dtype)
    result = run("rms_norm", x, weight, 1e-5).result
    assert result.dtype == dtype
    assert_close(result, truth(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_updates_the_residual_and_norms_what_it_stored(run, shape, dtype):
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
    outcome = run("add_rms_norm", x, residual, weight, 1e-6)
    normed, total = outcome.result
    assert torch.equal(total, x + residual)
    assert torch.equal(outcome.args[1], total)
    assert torch.equal(outcome.args[0], x)
    assert_close(normed, truth(total, weight, 1e-6))


def test_rows_of_a_wider_tensor(run):
    x, weight = torch.randn(5, 96)[:, :64], torch.randn(64)
    assert_close(run("rms_norm", x, weight, 1e-5).result, truth(x, weight, 1e-5))


def test_zero_row_stays_finite_and_nan_row_stays_alone(run):
    x = torch.randn(3, 64)
    x[0], x[1, 5] = 0, torch.nan
    result = run("rms_norm", x, torch.ones(64), 1e-5).result
    assert torch.equal(result[0], torch.zeros(64))
    assert result[1].isnan().any()
    assert_close(result[2:], truth(x[2:], torch.ones(64), 1e-5))
