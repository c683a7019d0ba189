"""The engine on a GPU against itself on the CPU, on a small random model of Llama's head shape."""

import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stoker.coldstart.publish import publish
from stoker.coldstart.ring import Ring
from stoker.coldstart.store import open_store
from stoker.runtime.engine import model
from stoker.runtime.engine.batch import prepare
from stoker.runtime.engine.config import ModelConfig
from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.models import Models
from stoker.runtime.engine.options import EngineOptions
from stoker.runtime.engine.request import GenerationRequest, SamplingParams
from stoker.runtime.engine.weights import plan
from stoker.runtime.wire import Frame

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

HF_CONFIG = {
    "model_type": "llama",
    "vocab_size": 5003,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 5,
}
CONFIG = ModelConfig.from_hf(HF_CONFIG)
POISON = 4000


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    cpu = plan(CONFIG, EngineOptions().resolve(CONFIG))
    made: dict[str, torch.Tensor] = {}
    for name, target in cpu.targets.items():
        noise = torch.randn(target.shape, generator=generator)
        made[name] = 1 + 0.1 * noise if noise.dim() == 1 else noise / math.sqrt(target.shape[-1])
    made["model.embed_tokens.weight"][POISON] = math.nan
    return made


STATE = state()


def engine(device: str, **options: Any) -> Engine:
    chosen = EngineOptions(
        **{"device": device, "dtype": "float32", "num_blocks": 512, "max_model_len": 1024, **options}
    ).resolve(CONFIG)
    weights = plan(CONFIG, chosen)
    for name, target in weights.targets.items():
        target.copy_(STATE[name])
    return Engine(CONFIG, chosen, weights, "random")


def requests(count: int, max_tokens: int = 16, **params: Any) -> list[GenerationRequest]:
    """Prompts of 1 to 500 tokens, half of them with a shared beginning."""
    rng = random.Random(7)
    shared = [rng.randrange(POISON) for _ in range(100)]
    made: list[GenerationRequest] = []
    for i in range(count):
        length = [1, 2, 15, 16, 17, 64, 129, 300, 500][i % 9]
        prompt = (shared if i % 2 else []) + [rng.randrange(POISON) for _ in range(length)]
        chosen = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **params})
        made.append(GenerationRequest(str(i), prompt, chosen))
    return made


@pytest.fixture(scope="module")
def greedy() -> dict[str, list[int]]:
    """What the CPU says, in float32."""
    return engine("cpu").generate(requests(18))


def test_float32_greedy_tokens_equal_those_of_the_cpu(greedy: dict[str, list[int]]) -> None:
    assert engine("cuda").generate(requests(18)) == greedy


def test_alone_cached_chunked_and_preempted_equal_batched(greedy: dict[str, list[int]]) -> None:
    alone = engine("cuda", prefix_cache=False)
    warm = engine("cuda", token_budget=64, max_seqs=16)
    tight = engine("cuda", num_blocks=70)
    for request in requests(18):
        assert alone.generate([request])[request.id] == greedy[request.id]
    assert warm.generate(requests(18)) == warm.generate(requests(18)) == greedy
    assert warm.stats()["prefix_hit_tokens"] > 0
    assert tight.generate(requests(18, max_tokens=60)) == engine("cuda").generate(requests(18, max_tokens=60))
    assert tight.stats()["preemptions"] > 0
    for one in (alone, warm, tight):
        assert one.stats()["used_blocks"] == 0


def test_seeded_sampling_gives_the_cpus_tokens() -> None:
    """Last-bit differences can decide between two tokens, so a few sequences may part ways; most may not."""
    params = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "seed": 3}
    ours, theirs = (engine(device).generate(requests(18, **params)) for device in ("cuda", "cpu"))
    assert sum(ours[name] == theirs[name] for name in ours) >= 16


@torch.inference_mode()
def first_logits(one: Engine, several: list[GenerationRequest]) -> torch.Tensor:
    for request in several:
        one.submit(request)
    work = one.scheduler.schedule()
    assert len(work) == len(several) and all(item.samples for item in work)
    batch, runner = prepare(work, one.options.device), one.runner
    hidden = model.forward(CONFIG, runner.weights, runner.cos_sin, runner.kv, batch)
    return model.logits(runner.weights, hidden).float().cpu()


def distinct(count: int) -> list[GenerationRequest]:
    return [request for request in requests(2 * count) if int(request.id) % 2 == 0]


def test_bfloat16_logits_are_close_to_float32() -> None:
    exact = first_logits(engine("cpu", token_budget=8192), distinct(9))
    rounded = first_logits(engine("cuda", dtype="bfloat16"), distinct(9))
    error = (rounded - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert error.max() < 0.03


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.03)])
def test_batched_logits_are_close_to_lone_ones(dtype: str, tolerance: float) -> None:
    batched = first_logits(engine("cuda", dtype=dtype), distinct(9))
    for row, request in zip(batched, distinct(9), strict=True):
        (alone,) = first_logits(engine("cuda", dtype=dtype), [request])
        assert (row - alone).norm() / alone.norm() < tolerance


def test_non_finite_values_stay_with_their_request() -> None:
    one = engine("cuda", dtype="bfloat16")
    one.runner.kv.fill_(math.nan)
    calm = engine("cuda", dtype="bfloat16").generate(requests(6))
    one.submit(GenerationRequest("bad", [1, 2, POISON, *range(40)], SamplingParams(5)))
    for request in requests(6):
        one.submit(request)
    got: dict[str, list[int]] = {}
    ends: dict[str, str | None] = {}
    while one.has_work():
        for delta in one.step():
            got.setdefault(delta.request_id, []).extend(delta.tokens)
            ends[delta.request_id] = delta.finish_reason
    assert (ends.pop("bad"), got.pop("bad")) == ("error", [])
    assert set(ends.values()) == {"length"}
    assert sum(got[name] == calm[name] for name in calm) >= 4, "bfloat16 may part ways, NaN may not spread"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nothing_compiles_after_the_warm_up(dtype: str) -> None:
    """In a process of its own: here, other tests have compiled kernels already."""
    subprocess.run([sys.executable, __file__, dtype], check=True, timeout=150)


def warm_up_and_work(dtype: str) -> None:
    from stoker.kernels.launch import compiled_variants

    one = engine("cuda", dtype=dtype, max_seqs=40, max_model_len=2048, num_blocks=1000)
    one.runner.warm_up()
    assert not one.runner.kv.any(), "the null block is clean again"
    ready = compiled_variants()
    assert ready > 0
    for count in (1, 2, 3, 5, 9, 18, 40):
        one.generate(requests(count))
        one.generate(requests(count, temperature=0.7))
        one.generate(requests(count, temperature=0.7, top_k=5, top_p=0.8, min_p=0.01))
    for length in (255, 513, 700, 1100, 2000):
        one.generate([GenerationRequest("long", [i % POISON for i in range(length)], SamplingParams(20))])
    assert compiled_variants() == ready, f"{compiled_variants() - ready} variants were compiled for requests"


def test_unloading_gives_the_memory_back() -> None:
    """All but cuBLAS's workspace, which belongs to the process."""
    engine("cuda").generate(requests(3))
    before = torch.cuda.memory_allocated()
    one = engine("cuda", kv_bytes=1 << 28, num_blocks=0)
    one.generate(requests(3))
    assert torch.cuda.memory_allocated() - before > 1 << 27
    del one
    assert torch.cuda.memory_allocated() - before < 1 << 20


def test_a_failed_load_gives_the_memory_back(tmp_path: Path) -> None:
    """To the driver, too: the next model is sized by what is free there."""
    save_file(STATE, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    store = open_store((tmp_path / "store").as_uri())
    manifest = publish(tmp_path, store, chunk_bytes=1 << 20)
    ring = Ring.create(1)
    frames: list[Frame] = []
    models = Models(frames.append, ring)
    options = {"device": "cuda", "num_blocks": 1}
    documents = {"config.json": store.read("config.json")}
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    models.handle({"t": "load", "model": "m", "manifest": manifest.pack(), "documents": documents, "options": options})
    assert torch.cuda.memory_reserved() > before
    for number, chunk in enumerate(manifest.chunks):
        name = manifest.files[chunk.file].name
        store.read_range(name, chunk.offset, ring.slot(0)[: chunk.length])
        models.handle({"t": "chunk", "model": "m", "chunk": number, "slot": 0})
    models.handle({"t": "chunks_done", "model": "m"})
    assert frames[-1]["t"] == "load_error" and frames[-1]["error"]["type"] == "out_of_memory"
    assert torch.cuda.memory_reserved() <= before
    ring.close()


if __name__ == "__main__":
    warm_up_and_work(sys.argv[1])
