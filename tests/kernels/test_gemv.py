import pytest
import torch

from stoker.kernels.tuning import UNTUNED, Gemv, Tuned, gemv_for

TABLE = Tuned(
    {},
    (
        Gemv(1, 4096, 4096, 1, 1024, 8, 1),
        Gemv(1, 128256, 4096, 0, 0, 0, 0),
        Gemv(1, 4096, 14336, 1, 2048, 8, 3),
        Gemv(4, 4096, 4096, 2, 1024, 8, 1),
    ),
)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize(("width", "depth", "block_n", "block_k"), [(64, 96, 1, 64), (37, 200, 4, 32), (8, 16, 2, 64)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_right_at_every_edge(interpreted, rows, width, depth, block_n, block_k, bias):
    x, weight = torch.randn(rows, depth).bfloat16(), torch.randn(width, depth).bfloat16()
    offset = torch.randn(width).bfloat16() if bias else None
    bucket = 1 << (rows - 1).bit_length()
    chosen = Gemv(bucket, width, depth, block_n, block_k, 4, 1)
    result = interpreted("gemv", x, weight, offset, chosen).result
    expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    torch.testing.assert_close(result.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("width", "depth", "block_n", "block_k"), [(64, 96, 1, 64), (74, 200, 4, 32), (8, 16, 2, 64)])
def test_gated_products_are_those_of_gate_and_up(interpreted, rows, width, depth, block_n, block_k):
    x, weight = torch.randn(rows, depth).bfloat16(), torch.randn(width, depth).bfloat16()
    bucket = 1 << (rows - 1).bit_length()
    result = interpreted("gemv", x, weight, None, Gemv(bucket, width, depth, block_n, block_k, 4, 1), True).result
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    torch.testing.assert_close(result.double(), gate * torch.sigmoid(gate) * up, rtol=3e-2, atol=3e-2)


def test_leading_dimensions_are_kept(interpreted):
    x, weight = torch.randn(2, 1, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    result = interpreted("gemv", x, weight, None, Gemv(2, 8, 64, 2, 64, 4, 1)).result
    torch.testing.assert_close(result, torch.nn.functional.linear(x, weight), rtol=1e-2, atol=1e-2)


def test_the_nearest_measured_shape_decides():
    assert gemv_for(1, 4096, 4096, TABLE.gemv) == TABLE.gemv[0]
    assert gemv_for(1, 5120, 3584, TABLE.gemv) == TABLE.gemv[0]
    assert gemv_for(1, 3584, 18944, TABLE.gemv) == TABLE.gemv[2]
    assert gemv_for(1, 151936, 3584, TABLE.gemv) is None, "cuBLAS won there"
    assert gemv_for(3, 4096, 14336, TABLE.gemv) == TABLE.gemv[3], "more rows than one take the next larger measurement"


def test_everything_else_is_cublas():
    assert gemv_for(5, 4096, 4096, TABLE.gemv) is None
    assert gemv_for(1, 4096, 4095, TABLE.gemv) is None
    assert gemv_for(1, 4096, 4096, UNTUNED.gemv) is None
