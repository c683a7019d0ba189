"""Adapters on a GPU: the kernels against their reference, and engines against the CPU's, in graphs and without."""

from typing import Any

import pytest
import torch

from stoker.kernels import ops, reference
from stoker.runtime.adapters.adapter_file import AdapterFile
from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.options import EngineOptions
from stoker.runtime.engine.request import GenerationRequest, SamplingParams
from stoker.runtime.engine.weights import plan
from tests.gpu.test_engine import CONFIG, HF_CONFIG, STATE, requests
from tests.runtime.adapters.folders import ALL, file_of, random_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

LLAMA = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
TOKENS = (1, 3, 16, 64, 128, 129, 600, 1500)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize("site", LLAMA)
def test_kernels_give_what_the_reference_gives(site: str, rank: int, tokens: int) -> None:
    depth, widths = LLAMA[site]
    generator = torch.Generator("cuda").manual_seed(tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32)

    a, b = random(5, len(widths) * rank, depth) / depth**0.5, random(5, sum(widths), rank) / rank**0.5
    x, y = random(tokens, depth).bfloat16(), random(tokens, sum(widths)).bfloat16()
    slots = torch.randint(0, 6, (tokens,), generator=generator, device="cuda", dtype=torch.int32)
    a, b, expected, untouched = a.bfloat16(), b.bfloat16(), y.clone(), y.clone()
    reference.add_lora(expected, x, a, b, slots, widths[0])
    ops.add_lora(y, x, a, b, slots, widths[0])
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=3e-2)
    assert torch.equal(y[slots == 0], untouched[slots == 0])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[AdapterFile]:
    root = tmp_path_factory.mktemp("adapters")
    kinds: list[dict[str, Any]] = [{}, {"rank": 16}, {"modules": ("q", "v")}, {"modules": ("gate", "down"), "rank": 4}]
    return [
        file_of(random_folder(root / str(seed), HF_CONFIG, seed, **{"modules": ALL, **fields}))
        for seed, fields in enumerate(kinds)
    ]


def engine(device: str, **options: Any) -> Engine:
    chosen = EngineOptions(
        **{
            "device": device,
            "dtype": "float32",
            "num_blocks": 512,
            "max_model_len": 1024,
            "adapter_slots": 4,
            **options,
        }
    ).resolve(CONFIG)
    weights = plan(CONFIG, chosen)
    for name, target in weights.targets.items():
        target.copy_(STATE[name])
    return Engine(CONFIG, chosen, weights, "random")


def mixed(files: list[AdapterFile], count: int = 24) -> list[GenerationRequest]:
    """Every fifth request names no adapter."""
    made = []
    for number, each in enumerate(requests(count)):
        file = files[number % 5] if number % 5 < len(files) else None
        made.append(GenerationRequest(each.id, each.prompt, each.params, adapter=file))
    return made


@pytest.fixture(scope="module")
def greedy(files: list[AdapterFile]) -> dict[str, list[int]]:
    return engine("cpu").generate(mixed(files))


def test_float32_greedy_tokens_equal_those_of_the_cpu(files: list[AdapterFile], greedy: dict[str, list[int]]) -> None:
    assert engine("cuda").generate(mixed(files)) == greedy


def test_graphs_and_few_slots_change_nothing(files: list[AdapterFile], greedy: dict[str, list[int]]) -> None:
    """And no kernel is compiled once the model is warm."""
    one = engine("cuda", adapter_slots=2, max_seqs=16)
    one.runner.warm_up()
    one.generate([GenerationRequest("first", [1], SamplingParams(1))])
    while one.prepare_idle():
        pass
    late = one.stats()["late_kernels"]
    assert one.generate(mixed(files)) == one.generate(mixed(files)) == greedy
    stats = one.stats()
    assert stats["graph_steps"] > 0 and stats["late_kernels"] == late
    assert stats["adapter_loads"] > 4 and stats["used_blocks"] == 0


def test_adapters_survive_a_swap(files: list[AdapterFile], greedy: dict[str, list[int]]) -> None:
    one = engine("cuda", prefix_cache=False)
    got: dict[str, list[int]] = {}
    for request in mixed(files):
        got[request.id] = []
        one.submit(request)
    for _ in range(6):
        for delta in one.step():
            got[delta.request_id] += delta.tokens
    for delta in one.suspend():
        got[delta.request_id] += delta.tokens
    assert one.adapters is not None
    slots = one.adapters._memory.view(-1).view(torch.uint8)
    slots.fill_(255)
    one.resume(one.runner.weights)
    one.adapters.rebind(slots)
    while one.has_work():
        for delta in one.step():
            got[delta.request_id] += delta.tokens
    assert got == greedy
