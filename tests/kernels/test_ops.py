import subprocess
import sys

import torch

from stoker.kernels import ops, reference


def test_cpu_tensors_run_the_reference():
    x, weight = torch.randn(3, 8), torch.randn(8)
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert torch.equal(ops.silu_mul(x), reference.silu_mul(x))
    assert torch.equal(ops.linear(x, weight[None]), x @ weight[:, None])
    assert torch.equal(ops.embed(torch.tensor([2, 0]), x), x[[2, 0]])
    normed, residual = ops.add_rms_norm(x, torch.ones(3, 8), weight, 1e-5)
    assert torch.equal(residual, x + 1) and torch.equal(normed, reference.rms_norm(x + 1, weight, 1e-5))


def test_one_decode_step_through_the_cache():
    q, k, v = torch.randn(1, 4, 16), torch.randn(1, 2, 16), torch.randn(1, 2, 16)
    cache, cos_sin = torch.zeros(3, 2, 16, 2, 16), torch.cat((torch.ones(9, 8), torch.zeros(9, 8)), 1)
    rotated = ops.rope_store(q, k, v, cos_sin, torch.tensor([0]), cache, torch.tensor([32]))
    table, start = torch.tensor([[2]], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    mixed = ops.paged_attention(rotated, cache, table, start, torch.tensor([1], dtype=torch.int32), 0.25)
    torch.testing.assert_close(mixed, v.repeat_interleave(2, dim=1))


def test_greedy_token():
    zero, off = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    seed = torch.zeros(1, dtype=torch.int64)
    assert ops.sample(torch.tensor([[0.0, 3.0, 1.0]]), zero, off, zero + 1, zero, seed, seed).tolist() == [1]


def test_a_process_without_a_gpu_never_imports_triton():
    code = (
        "import sys, torch\n"
        "from stoker.kernels import ops\n"
        "ops.silu_mul(torch.ones(1, 4))\n"
        "sys.exit('triton' in sys.modules or 'stoker.kernels.device' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
