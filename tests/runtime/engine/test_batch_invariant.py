"""The mode in which a request's logits are the same bits whatever runs beside it, and however its own steps are cut."""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.runtime.encoder.bert import BertConfig, BertWeights
from stoker.runtime.encoder.embedder import Embedder
from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.options import EngineOptions
from stoker.runtime.engine.request import GenerationRequest, SamplingParams
from tests.runtime.adapters.folders import file_of, random_folder
from tests.runtime.engine.conftest import TinyModel
from tests.runtime.engine.invariance import Seen, check_same, run

LONGEST = 64
SHARED = [3 + i * 11 % 90 for i in range(33)]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 0.9, "logprobs": 0},
    {"temperature": 1.2, "top_k": 7, "logprobs": 20},
    {"temperature": 1.0, "top_p": 0.8, "frequency_penalty": 0.3, "logprobs": 2},
    {"temperature": 0.7, "min_p": 0.05},
]
SCHEDULES, GROUPS = 32, 2


def catalogue() -> list[GenerationRequest]:
    rng = random.Random(5)
    made: list[GenerationRequest] = []
    for i in range(20):
        prompt = rng.choice([[], SHARED, SHARED[:16]]) + [rng.randrange(97) for _ in range(rng.randint(1, 17))]
        most = LONGEST - len(prompt)
        sampling = SAMPLINGS[i % len(SAMPLINGS)]
        params = SamplingParams(rng.randint(min(4, most), min(14, most)), seed=i, ignore_eos=True, **sampling)
        made.append(GenerationRequest(str(i), prompt, params, cache_salt=rng.choice([b"", b"tenant"])))
    return made


CATALOGUE = catalogue()


def invariant(tiny: TinyModel, **options: Any) -> Engine:
    return tiny.engine(**{"max_model_len": LONGEST, "batch_invariant": True, **options})


@pytest.fixture(scope="module")
def lone(tiny: TinyModel) -> dict[str, Seen]:
    engine = invariant(tiny, prefix_cache=False)
    return {request.id: run(engine, [request])[request.id] for request in CATALOGUE}


@pytest.mark.parametrize("group", range(GROUPS))
def test_every_schedule_gives_the_bits_of_lone_runs(tiny: TinyModel, lone: dict[str, Seen], group: int) -> None:
    preempted = hit = 0
    for seed in range(group, SCHEDULES, GROUPS):
        rng = random.Random(seed)
        max_seqs = rng.randint(2, 8)
        engine = invariant(
            tiny,
            num_blocks=rng.randint(LONGEST // 16, 6),
            max_seqs=max_seqs,
            token_budget=rng.randint(max_seqs, 48),
            prefix_cache=rng.random() < 0.8,
            host_cache_bytes=rng.choice([0, 200 << 10]),
            async_scheduling=rng.choice(["on", "off"]),
        )
        coming = rng.sample(CATALOGUE, rng.randint(4, 8))
        check_same(run(engine, coming, rng), lone)
        stats = engine.stats()
        preempted += stats["preemptions"] > 0
        hit += stats["prefix_hit_tokens"] > 0
    assert min(preempted, hit) > 3, "the schedules are too tame to show anything"


@pytest.mark.parametrize("threads", [1, 2])
def test_a_wider_model_on_several_threads(threads: int) -> None:
    wide = TinyModel.random(hidden_size=256, intermediate_size=520, head_dim=64, vocab_size=1003)
    torch.set_num_threads(threads)
    expected = {request.id: run(invariant(wide), [request])[request.id] for request in CATALOGUE[:4]}
    check_same(run(invariant(wide, token_budget=13, max_seqs=4), CATALOGUE[:4]), expected)


def test_a_broken_request_ends_alone(tiny: TinyModel, lone: dict[str, Seen]) -> None:
    broken = TinyModel(tiny.hf_config, tiny.config, {name: tensor.clone() for name, tensor in tiny.state.items()})
    broken.state["model.embed_tokens.weight"][96] = math.nan
    engine = invariant(broken)
    coming = [request for request in CATALOGUE if 96 not in request.prompt][:4]
    for request in (*coming, GenerationRequest("broken", [1, 96, 2], SamplingParams(4))):
        engine.submit(request)
    ends: dict[str, str] = {}
    tokens: dict[str, list[int]] = {request.id: [] for request in coming}
    while engine.has_work():
        for delta in engine.step():
            ends[delta.request_id] = delta.finish_reason or ""
            tokens.setdefault(delta.request_id, []).extend(delta.tokens)
    assert ends.pop("broken") == "error" and not tokens.pop("broken")
    assert all(96 in lone[name].tokens or lone[name].tokens == own for name, own in tokens.items())


def test_modes_never_share_blocks_of_the_prompt_cache(tiny: TinyModel) -> None:
    roots: list[bytes] = []
    for engine in (tiny.engine(), tiny.engine(batch_invariant=True), tiny.engine(batch_invariant=True)):
        engine.submit(GenerationRequest("r", [1] * 20, SamplingParams(1)))
        roots.append(engine.scheduler.waiting[0].chain.key(0))
    assert roots[0] != roots[1] == roots[2]


def test_rows_with_adapters_and_without(tiny: TinyModel, tmp_path: Path) -> None:
    files = [None, *(file_of(random_folder(tmp_path / str(seed), tiny.hf_config, seed)) for seed in (1, 2))]
    coming = [replace(request, adapter=files[i % 3]) for i, request in enumerate(CATALOGUE[:9])]
    expected = {request.id: run(invariant(tiny, adapter_slots=2), [request])[request.id] for request in coming}
    check_same(run(invariant(tiny, adapter_slots=2, token_budget=11, max_seqs=9), coming), expected)


def test_encoders_have_no_such_mode() -> None:
    config = BertConfig(100, 16, 32, 1, 2, 64, 2, 1e-12, "mean")
    options = EngineOptions(batch_invariant=True).resolve(config)
    with pytest.raises(ValueError, match="batch_invariant is for language models: leave it out"):
        Embedder(config, options, BertWeights.plan(config, options, {}))
