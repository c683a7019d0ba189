"""Batch-invariant steps on a GPU: the bits of a row's results, of single operations at the sizes of an 8B Llama and of
whole engines."""

import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.runtime.engine.config import ModelConfig
from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.options import EngineOptions
from stoker.runtime.engine.request import GenerationRequest, SamplingParams
from stoker.runtime.engine.weights import plan
from tests.gpu.graphs import captured
from tests.runtime.engine.invariance import Seen, check_same, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (960, 576), (1001, 2056)]
COUNTS = (1, 2, 3, 4, 7, 8, 16, 31, 64, 100, 127, 128, 129, 200, 256, 257, 600)
# Few layers, but products of one part and of several, and every kind of attention.
HF_CONFIG = {
    "model_type": "llama",
    "vocab_size": 5003,
    "hidden_size": 512,
    "intermediate_size": 4096,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 5,
}
WINDOWED = {**HF_CONFIG, "model_type": "mistral", "sliding_window": 100}
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 0.8, "logprobs": 0},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "logprobs": 20},
    {"temperature": 0.9, "frequency_penalty": 0.2, "logprobs": 1},
    {"temperature": 0.7},
]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def ops():
    from stoker.kernels import ops

    return ops


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("width", "depth"), SHAPES)
def test_a_row_of_a_product_is_the_same_in_every_batch(ops, width: int, depth: int, dtype: torch.dtype) -> None:
    x = torch.randn(4096 if width < 10_000 else 700, depth, device="cuda").to(dtype)
    weight = (torch.randn(width, depth, device="cuda") / math.sqrt(depth)).to(dtype)
    with ops.batch_invariant(True):
        whole = ops.linear(x, weight)
        counts = range(1, 201) if dtype == torch.bfloat16 and width < 10_000 else COUNTS
        for count in (*counts, *COUNTS, 2048):
            assert torch.equal(ops.linear(x[:count], weight), whole[:count]), count
        for row in (1, 63, 64, 127, 128, 300, 699):
            assert torch.equal(ops.linear(x[row : row + 1], weight), whole[row : row + 1]), row
            assert torch.equal(ops.linear(x[row : row + 9], weight), whole[row : row + 9]), row
    limit = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(whole[:300].double(), x[:300].double() @ weight.double().T, **limit)


@pytest.mark.parametrize("bias", [False, True])
def test_biased_and_gated_products(ops, bias: bool) -> None:
    x, weight = torch.randn(500, 4096, device="cuda").bfloat16(), torch.randn(6144, 4096, device="cuda").bfloat16() / 64
    offset = torch.randn(6144, device="cuda").bfloat16() if bias else None
    with ops.batch_invariant(True):
        whole, gated = ops.linear(x, weight, offset), ops.gated_linear(x, weight)
        for count in COUNTS[:-1]:
            assert torch.equal(ops.linear(x[:count], weight, offset), whole[:count]), count
            assert torch.equal(ops.gated_linear(x[:count], weight), gated[:count]), count
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(whole.double(), expected + (0 if offset is None else offset), rtol=2e-2, atol=2e-2)
    gate, up = expected.chunk(2, -1)
    torch.testing.assert_close(gated.double(), gate * gate.sigmoid() * up, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64), (28, 4, 128), (8, 1, 256)])
def test_attention_of_a_token_is_the_same_in_chunks_of_every_size(
    ops, heads: tuple[int, int, int], window: int, dtype: torch.dtype
) -> None:
    q_heads, kv_heads, dim = heads
    length, blocks = 2000, 125
    q = torch.randn(2 * length, q_heads, dim, device="cuda").to(dtype)
    cache = torch.randn(2 * blocks + 1, 2, 16, kv_heads, dim, device="cuda").to(dtype)
    table = (torch.randperm(2 * blocks).view(2, blocks) + 1).int().cuda()

    def attended(*steps: tuple[int, int, int]) -> list[torch.Tensor]:
        """Of (sequence, start, stop) in one step."""
        lengths = [stop - start for _, start, stop in steps]
        rows = torch.cat([q[sequence * length :][start:stop] for sequence, start, stop in steps])
        starts = torch.tensor([0, *lengths]).cumsum(0).int().cuda() if max(lengths) > 1 else None
        ends = torch.tensor([stop for *_, stop in steps]).int().cuda()
        tables = table[[sequence for sequence, *_ in steps]]
        with ops.batch_invariant(True):
            found = ops.paged_attention(rows, cache, tables, starts, ends, dim**-0.5, window)
        return list(found.split(lengths))

    [whole] = attended((0, 0, length))
    assert torch.equal(attended((1, 0, 999), (0, 0, length))[1], whole)
    for size in (1999, 1000, 333, 64, 17):
        chunks = [attended((0, at, min(at + size, length)))[0] for at in range(0, length, size)]
        assert torch.equal(torch.cat(chunks), whole), size
    for token in (0, 1, 15, 16, 63, 64, 299, 300, 301, 1023, 1024, 1500, length - 1):
        here = slice(token, token + 1)
        assert torch.equal(attended((0, token, token + 1))[0], whole[here]), token
        assert torch.equal(attended((1, 3, 700), (0, token, token + 1), (1, 900, 901))[1], whole[here]), token
        others = [(1, other, other + 1) for other in range(0, length, 40)]
        assert torch.equal(attended(*others, (0, token, token + 1))[-1], whole[here]), token


def test_rows_of_the_other_operations(ops) -> None:
    x, weight = torch.randn(600, 4096, device="cuda").bfloat16(), torch.randn(4096, device="cuda").bfloat16()
    gate_up, logits = torch.randn(600, 28672, device="cuda").bfloat16(), torch.randn(300, 50257, device="cuda")
    q, k = torch.randn(600, 32, 128, device="cuda").bfloat16(), torch.randn(600, 8, 128, device="cuda").bfloat16()
    a, b = torch.randn(2, 16, 4096, device="cuda").bfloat16(), torch.randn(2, 4096, 16, device="cuda").bfloat16()
    slots, positions, table = torch.arange(600, device="cuda"), torch.arange(600, device="cuda"), torch.randn(600, 128)
    norms = (torch.randn(128, device="cuda").bfloat16(), torch.randn(128, device="cuda").bfloat16(), 1e-6)
    table, chosen = table.cuda(), torch.randint(0, 3, (600,), device="cuda").int()

    def rotated(rows: slice) -> torch.Tensor:
        cache = torch.zeros(38, 2, 16, 8, 128, device="cuda").bfloat16()
        turned = ops.rope_store(q[rows], k[rows], k[rows], table, positions[rows], cache, slots[rows], norms)
        stored = cache.transpose(1, 2).flatten(0, 1)[slots[rows]]
        return torch.cat((turned, stored.flatten(1, 2)), 1)

    def adapted(rows: slice) -> torch.Tensor:
        y = x[rows].clone()
        ops.add_lora(y, x[rows], a, b, chosen[rows], 4096)
        return y

    def added(rows: slice) -> torch.Tensor:
        return torch.stack(ops.add_rms_norm(x[rows], x[rows].flip(1).contiguous(), weight, 1e-5))

    operations = {
        "rms_norm": lambda rows: ops.rms_norm(x[rows], weight, 1e-5),
        "add_rms_norm": lambda rows: added(rows).transpose(0, 1),
        "silu_mul": lambda rows: ops.silu_mul(gate_up[rows]),
        "rope_store": rotated,
        "add_lora": adapted,
        "log_total": lambda rows: ops.log_total(logits[: rows.stop][rows.start :]),
    }
    with ops.batch_invariant(True):
        for name, operation in operations.items():
            whole = operation(slice(0, 600))
            for rows in (slice(0, 1), slice(77, 78), slice(0, 65), slice(9, 140), slice(100, 300), slice(3, 299)):
                assert torch.equal(operation(rows), whole[rows]), (name, rows)


def engine(hf_config: dict[str, Any] = HF_CONFIG, dtype: str = "bfloat16", **options: Any) -> Engine:
    config = ModelConfig.from_hf(hf_config)
    wanted = {"num_blocks": 3000, "max_model_len": 2048, "max_seqs": 64, "batch_invariant": True, **options}
    chosen = EngineOptions(device="cuda", dtype=dtype, **wanted).resolve(config)  # type: ignore[arg-type]
    weights = plan(config, chosen)
    generator = torch.Generator().manual_seed(0)
    for target in weights.targets.values():
        noise = torch.randn(target.shape, generator=generator)
        target.copy_(1 + 0.1 * noise if noise.dim() == 1 else noise / math.sqrt(target.shape[-1]))
    return Engine(config, chosen, weights, "random")


def requests(count: int = 64) -> list[GenerationRequest]:
    """Prompts of 1 to 1600 tokens, half of them with a shared beginning."""
    rng = random.Random(7)
    shared = [rng.randrange(5000) for _ in range(100)]
    made: list[GenerationRequest] = []
    for i in range(count):
        length = [1, 2, 15, 16, 17, 64, 129, 300, 500, 1500][i % 10]
        prompt = (shared if i % 2 else []) + [rng.randrange(5000) for _ in range(length)]
        params = SamplingParams(12, seed=i, ignore_eos=True, **SAMPLINGS[i % len(SAMPLINGS)])
        made.append(GenerationRequest(str(i), prompt, params))
    return made


@pytest.fixture(scope="module")
def lone() -> dict[str, Seen]:
    one = engine(prefix_cache=False, cuda_graphs=False, async_scheduling="off")
    return {request.id: run(one, [request])[request.id] for request in requests()}


@pytest.mark.parametrize("size", [2, 7, 64])
def test_a_batch_of_any_size(lone: dict[str, Seen], size: int) -> None:
    one, coming = engine(prefix_cache=False), requests()
    for start in range(0, 64, size):
        check_same(run(one, coming[start : start + size]), lone)


@pytest.mark.parametrize("budget", [64, 100, 333, 2048])
def test_prompts_in_chunks_of_any_size(lone: dict[str, Seen], budget: int) -> None:
    check_same(run(engine(token_budget=budget, prefix_cache=False), requests()), lone)


def test_hits_of_the_prompt_cache(lone: dict[str, Seen]) -> None:
    one = engine()
    check_same(run(one, requests()), lone)
    check_same(run(one, requests()), lone)
    for request in requests()[::9]:
        check_same(run(one, [request]), lone)
    assert one.stats()["prefix_hit_tokens"] > 5000


def test_graphs_and_their_padding(lone: dict[str, Seen]) -> None:
    one, coming = captured(engine()), requests()
    for size in (1, 3, 11, 64):
        for start in range(0, 64, 64 if size == 64 else 16):
            check_same(run(one, coming[start : start + size]), lone)
    assert one.stats()["graph_steps"] > 100


def test_arrivals_over_time_and_preemption(lone: dict[str, Seen]) -> None:
    preempted = hit = 0
    for seed in range(4):
        rng = random.Random(seed)
        options = {"num_blocks": rng.randint(130, 180), "max_seqs": rng.randint(16, 40), "cuda_graphs": seed > 0}
        one = engine(token_budget=rng.choice([64, 256, 1024]), host_cache_bytes=seed % 2 << 26, **options)
        for _ in range(2):
            check_same(run(one, rng.sample(requests(), 40), rng), lone)
        preempted += one.stats()["preemptions"]
        hit += one.stats()["prefix_hit_tokens"]
    assert preempted and hit, "the schedules are too tame to show anything"


@pytest.mark.parametrize(("hf_config", "dtype"), [(WINDOWED, "bfloat16"), (HF_CONFIG, "float32")])
def test_windows_and_float32(hf_config: dict[str, Any], dtype: str) -> None:
    one = engine(hf_config, dtype, prefix_cache=False)
    alone = {request.id: run(one, [request])[request.id] for request in requests(20)}
    check_same(run(engine(hf_config, dtype, token_budget=200), requests(20)), alone)


def test_logits_are_as_close_to_float32_as_those_of_the_usual_mode() -> None:
    first = [replace(request, params=SamplingParams(1, logprobs=0)) for request in requests(20)]
    exact = run(engine(dtype="float32", batch_invariant=False), first)

    def error(mode: bool) -> float:
        found = run(engine(batch_invariant=mode), first)
        pairs = [(found[name].logits[0].float(), exact[name].logits[0]) for name in exact]
        return max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs)

    assert error(True) < max(0.03, 1.2 * error(False))


def test_nothing_compiles_after_the_warm_up() -> None:
    """In a process of its own: here, other tests have compiled kernels already."""
    command = [sys.executable, "-m", "tests.gpu.test_batch_invariant"]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=300)


def warm_up_and_work() -> None:
    one = captured(engine())
    run(one, requests())
    for request in requests()[::7]:
        run(one, [request])
    assert one.stats()["late_kernels"] == 0


if __name__ == "__main__":
    warm_up_and_work()
