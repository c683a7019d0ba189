"""The engine on a GPU against itself on the CPU, on a small random model of Llama's head shape."""

import gc
import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stoker.coldstart.publish import publish
from stoker.coldstart.ring import Ring
from stoker.coldstart.store import open_store
from stoker.coldstart.timeline import Timeline
from stoker.runtime.engine import model
from stoker.runtime.engine.config import ModelConfig
from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.models import Models
from stoker.runtime.engine.options import EngineOptions
from stoker.runtime.engine.request import GenerationRequest, SamplingParams
from stoker.runtime.engine.sizing import graph_reserve
from stoker.runtime.engine.weights import plan
from stoker.runtime.wire import Frame
from tests.gpu.graphs import captured
from tests.runtime.engine.random_schedules import CATALOGUE, LONGEST, Schedule

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
    runner = one.runner
    batch = runner.batch(work)
    hidden = model.forward(CONFIG, runner.weights, runner.cos_sin, runner.kv, batch)
    return model.logits(runner.weights, hidden)[: len(work)].float().cpu()


def test_graphs_give_the_tokens_of_eager_and_of_synchronous_steps() -> None:
    params = {"max_tokens": 24, "temperature": 0.8, "top_k": 40}
    many = [replace(r, params=replace(r.params, seed=i)) for i, r in enumerate(requests(40, **params))]
    eager = engine("cuda", max_seqs=40, num_blocks=1200, async_scheduling="off", cuda_graphs=False)
    expected = eager.generate(many)
    assert eager.stats()["graphs"] == 0
    lazy = engine("cuda", max_seqs=40, num_blocks=1200)
    whole = captured(engine("cuda", max_seqs=40, num_blocks=1200))
    assert lazy.generate(many) == whole.generate(many) == expected
    assert whole.generate([many[3]]) == {"3": expected["3"]}
    assert 0 < lazy.stats()["graphs"] < whole.stats()["graphs"]
    assert lazy.stats()["graph_steps"] > 0 and whole.stats()["graph_steps"] >= whole.stats()["steps"] - 5
    assert whole.stats()["graph_bytes"] <= graph_reserve(CONFIG, whole.options)


def test_no_graph_is_captured_before_the_first_answer() -> None:
    one = engine("cuda")
    one.runner.warm_up()
    assert not one.prepare_idle()
    one.submit(requests(1)[0])
    while not one.step():
        assert one.stats()["graphs"] == 0
    while one.has_work():
        before = one.stats()["graphs"]
        one.step()
        assert one.stats()["graphs"] <= before + 1, "at most one a step"
    assert one.prepare_idle() and one.stats()["graphs"] > 0


@pytest.mark.parametrize("sizes", [(1,), (20,), (5, 1, 1), (1,) * 3, (1,) * 9, (300, 1)])
def test_padding_touches_no_real_row(sizes: tuple[int, ...]) -> None:
    """A replayed step of odd size, over a cache full of NaN: only the slots of its own tokens change."""
    one = captured(engine("cuda", max_seqs=16, prefix_cache=False))
    for i, size in enumerate(sizes):
        one.submit(GenerationRequest(str(i), [7 * i + j for j in range(size)], SamplingParams(4, 0.0, ignore_eos=True)))
    one.runner.kv.fill_(math.nan)
    work, replays = one.scheduler.schedule(), one.stats()["graph_steps"]
    outcomes = one.runner.run(work)
    assert one.stats()["graph_steps"] == replays + 1
    assert all(outcome.token >= 0 for outcome in outcomes)
    written = {item.sequence.blocks[i // 16] * 16 + i % 16 for item in work for i in range(item.count)}
    slots = one.runner.kv.isfinite().all(-1).all(-1).permute(0, 3, 1, 2).flatten(2).all(-1).flatten()
    assert set(slots.nonzero().flatten().tolist()) == written
    changed = one.runner.kv.isfinite().permute(0, 3, 1, 2, 4, 5).flatten(2).any(-1).flatten()
    assert set(changed.nonzero().flatten().tolist()) == written


@pytest.mark.parametrize("seed", range(4))
def test_random_arrivals_aborts_and_preemptions_equal_calm_runs(greedy: dict[str, list[int]], seed: int) -> None:
    rng = random.Random(seed)
    one = captured(engine("cuda", num_blocks=rng.randint(70, 110), max_seqs=rng.randint(3, 12), token_budget=256))
    coming = requests(18)
    rng.shuffle(coming)
    got: dict[str, list[int]] = {request.id: [] for request in coming}
    ends: dict[str, str] = {}
    while coming or one.has_work():
        while coming and rng.random() < 0.5:
            one.submit(coming.pop())
        if rng.random() < 0.05:
            one.abort(str(rng.randrange(18)))
        for delta in one.step():
            assert delta.request_id not in ends
            got[delta.request_id] += delta.tokens
            ends |= {delta.request_id: delta.finish_reason} if delta.finish_reason else {}
    for name, tokens in got.items():
        assert tokens == (greedy[name] if ends[name] == "length" else greedy[name][: len(tokens)])
    assert one.stats()["used_blocks"] == 0


SCHEDULES = 500
TIGHT: list[dict[str, Any]] = [
    {"num_blocks": 5, "max_seqs": 2, "token_budget": 24, "host_cache_bytes": 8 << 20},
    {"num_blocks": 6, "max_seqs": 4, "token_budget": 8, "async_scheduling": "off"},
    {"num_blocks": 7, "max_seqs": 6, "token_budget": 48, "host_cache_bytes": 1 << 20},
    {"num_blocks": 8, "max_seqs": 5, "token_budget": 33, "prefix_cache": False},
    {"num_blocks": 9, "max_seqs": 3, "token_budget": 17},
]


@pytest.fixture(scope="module")
def lone() -> dict[str, list[int]]:
    one = engine("cuda", max_model_len=LONGEST, prefix_cache=False)
    return {request.id: one.generate([request])[request.id] for request in CATALOGUE}


@pytest.mark.parametrize("number", range(len(TIGHT)))
def test_500_random_schedules_equal_lone_runs(lone: dict[str, list[int]], number: int) -> None:
    """float32, every step a replayed graph. A last bit may decide between two tokens, once in 500 requests at most."""
    one = captured(engine("cuda", max_model_len=LONGEST, **TIGHT[number]))
    parted = requests = aborted = 0
    for seed in range(number, SCHEDULES, len(TIGHT)):
        rng = random.Random(seed)
        schedule = Schedule(one, lone, rng, exact=False)
        schedule.run(aborts=rng.choice([0.0, 0.02, 0.1, 0.5]))
        parted, requests = parted + schedule.parted, requests + len(schedule.got)
        aborted += len(schedule.aborted)
    assert parted <= requests / 500, f"{parted} of {requests} requests differ from their lone runs"
    assert one.stats()["preemptions"] > 20 and aborted > 50
    assert (one.stats()["prefix_hit_tokens"] > 0) == TIGHT[number].get("prefix_cache", True)
    assert (one.stats()["host_hit_tokens"] > 0) == ("host_cache_bytes" in TIGHT[number])


def test_the_triton_preparation_equals_the_torch_one() -> None:
    script = Path(__file__).parents[1] / "runtime" / "engine" / "test_prepare.py"
    subprocess.run([sys.executable, str(script), "cuda"], check=True, timeout=100)


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
    command = [sys.executable, "-m", "tests.gpu.test_engine", dtype]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=150)


def warm_up_and_work(dtype: str) -> None:
    from stoker.kernels.launch import origins

    one = engine("cuda", dtype=dtype, max_seqs=40, max_model_len=2048, num_blocks=1000)
    one.runner.warm_up()
    assert not one.runner.kv.any(), "the null block is clean again"
    ready = origins()
    assert ready["compiled"] + ready["restored"] > 0
    for count in (1, 2, 3, 5, 9, 18, 40):
        one.generate(requests(count))
        one.generate(requests(count, temperature=0.7))
        one.generate(requests(count, temperature=0.7, top_k=5, top_p=0.8, min_p=0.01))
    for length in (255, 513, 700, 1100, 2000):
        one.generate([GenerationRequest("long", [i % POISON for i in range(length)], SamplingParams(20))])
    while one.prepare_idle():
        pass
    one.generate(requests(40))
    assert origins() == ready, "variants were made for requests"
    assert one.stats()["late_kernels"] == 0


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
    models = Models(frames.append, ring, lambda frame: None, Timeline())

    def send(frame: Frame) -> None:
        if not models.route(frame):
            models.handle(frame)

    options = {"device": "cuda", "num_blocks": 1}
    documents = {"config.json": store.read("config.json")}
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    send({"t": "load", "model": "m", "manifest": manifest.pack(), "documents": documents, "options": options})
    for number, chunk in enumerate(manifest.chunks):
        name = manifest.files[chunk.file].name
        store.read_range(name, chunk.offset, ring.slot(0)[: chunk.length])
        send({"t": "chunk", "model": "m", "chunk": number, "slot": 0})
    send({"t": "chunks_done", "model": "m"})
    (error,) = [frame["error"] for frame in frames if frame["t"] == "load_error"]
    assert error["type"] == "out_of_memory"
    assert sum(frame["t"] == "slot_free" for frame in frames) == len(manifest.chunks)
    assert torch.cuda.memory_reserved() <= before
    ring.close()


if __name__ == "__main__":
    warm_up_and_work(sys.argv[1])
