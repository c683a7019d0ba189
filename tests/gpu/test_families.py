"""Families, steering, grammars and text encoders on a GPU against the CPU: small random models, eager and in graphs."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from stoker.kernels import reference
from stoker.runtime.encoder.bert import BertConfig, BertWeights
from stoker.runtime.encoder.embedder import Embedder
from stoker.runtime.engine.config import ModelConfig
from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.options import EngineOptions
from stoker.runtime.engine.request import Delta, EmbedRequest, GenerationRequest, SamplingParams
from stoker.runtime.engine.weights import plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

BASE = {
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
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 150},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen2 windows": {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 1,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "llama": {"architectures": ["LlamaForCausalLM"]},
}


def state_of(config: ModelConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, target in plan(config, EngineOptions().resolve(config)).targets.items():
        noise = torch.randn(target.shape, generator=generator)
        made[name] = 1 + 0.1 * noise if noise.dim() == 1 else noise / math.sqrt(target.shape[-1])
    return made


def engine(config: ModelConfig, state: dict[str, torch.Tensor], device: Any, **options: Any) -> Engine:
    chosen = EngineOptions(
        **{"device": device, "dtype": "float32", "num_blocks": 512, "max_model_len": 1024, **options}
    ).resolve(config)
    weights = plan(config, chosen)
    for name, target in weights.targets.items():
        target.copy_(state[name])
    return Engine(config, chosen, weights, "random")


def requests(count: int, **params: Any) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for i in range(count):
        prompt = torch.randint(6, 5000, ([1, 17, 130, 300][i % 4],), generator=generator).tolist()
        chosen = SamplingParams(**{"max_tokens": 16, "temperature": 0.0, "ignore_eos": True, **params})
        made.append(GenerationRequest(str(i), prompt, chosen))
    return made


def run(engine: Engine, asked: list[GenerationRequest]) -> dict[str, list[Delta]]:
    answers: dict[str, list[Delta]] = {each.id: [] for each in asked}
    for each in asked:
        engine.submit(each)
    while engine.has_work():
        for item in engine.step():
            assert item.finish_reason != "error", item.error
            answers[item.request_id].append(item)
    return answers


def tokens(answers: dict[str, list[Delta]]) -> dict[str, list[int]]:
    return {name: [token for item in deltas for token in item.tokens] for name, deltas in answers.items()}


def with_graphs(engine: Engine) -> Engine:
    """Every bucket captured, as an idle engine does it."""
    run(engine, requests(1))
    while engine.prepare_idle():
        pass
    assert engine.stats()["graphs"] > 10
    return engine


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_the_cpu(family: str) -> None:
    config = ModelConfig.from_hf({**BASE, **FAMILIES[family]})
    state = state_of(config)
    expected = tokens(run(engine(config, state, "cpu"), requests(10)))
    eager = engine(config, state, "cuda", cuda_graphs=False)
    assert tokens(run(eager, requests(10))) == expected
    replayed = with_graphs(engine(config, state, "cuda"))
    assert tokens(run(replayed, requests(10))) == expected
    assert replayed.stats()["graph_steps"] > 5


STEERED: list[dict[str, Any]] = [
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3},
    {"logit_bias": ((7, 5.0), (9, -100.0))},
    {"logprobs": 4},
    {"frequency_penalty": 0.7, "logprobs": 0},
    {},
]


def mixed(**params: Any) -> list[GenerationRequest]:
    asked = requests(12, **params)
    return [replace(each, params=replace(each.params, **STEERED[i % 6])) for i, each in enumerate(asked)]


def test_steered_rows_equal_those_of_the_cpu_eager_and_in_graphs() -> None:
    config = ModelConfig.from_hf({**BASE, **FAMILIES["llama"]})
    state = state_of(config)
    theirs = run(engine(config, state, "cpu"), mixed())
    replayed = with_graphs(engine(config, state, "cuda"))
    for chosen in (engine(config, state, "cuda", cuda_graphs=False), replayed):
        ours = run(chosen, mixed())
        assert tokens(ours) == tokens(theirs)
        for name, deltas in theirs.items():
            for mine, other in zip(ours[name], deltas, strict=True):
                for a, b in zip(mine.logprobs, other.logprobs, strict=True):
                    assert a.ids == b.ids
                    assert [a.logprob, *a.logprobs] == pytest.approx([b.logprob, *b.logprobs], abs=2e-3)
    assert replayed.stats()["graph_steps"] > 5


def test_sampled_steered_rows_are_the_same_alone_and_together() -> None:
    config = ModelConfig.from_hf({**BASE, **FAMILIES["llama"]})
    state = state_of(config)
    chosen = engine(config, state, "cuda", dtype="bfloat16", prefix_cache=False)
    # One bucket for all: the GEMMs' own rounding is no subject here.
    together = tokens(run(chosen, mixed(temperature=1.0, top_k=40)))
    again = tokens(run(chosen, mixed(temperature=1.0, top_k=40)))
    assert together == again


def digit_tokenizer() -> str:
    """5003 tokens of which the first ones are single characters, the sixth the end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = [chr(code) for code in range(33, 127)]
    rest = [f"{a}{b}{c}" for a in letters for b in letters[:26] for c in letters[:3]][: 5003 - len(letters) - 1]
    vocabulary = dict(zip([*letters[:5], "<end>", *letters[5:], *rest], range(5003), strict=True))
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer.to_str()


def test_grammars_hold_and_leave_their_neighbours_alone() -> None:
    pytest.importorskip("llguidance")
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer

    from stoker.runtime.engine.grammars import Grammars
    from stoker.runtime.grammar import regex_grammar

    config = ModelConfig.from_hf({**BASE, **FAMILIES["llama"]})
    state = state_of(config)
    chosen = with_graphs(engine(config, state, "cuda"))
    source = digit_tokenizer()
    chosen.grammars = Grammars(source, 5003, (5,))
    plain = requests(4)
    asked = [
        GenerationRequest(f"g{i}", [10, 11], SamplingParams(24, seed=i, grammar=regex_grammar("(ab|c){2,5}-[0-9]{3}")))
        for i in range(4)
    ]
    alone = tokens(run(chosen, plain))
    answers = run(chosen, [*plain, *asked])
    assert {name: tokens(answers)[name] for name in alone} == alone
    decoder = Tokenizer.from_str(source)
    for name in ("g0", "g1", "g2", "g3"):
        assert answers[name][-1].finish_reason == "stop"
        text = decoder.decode(tokens(answers)[name])
        assert text[-4] == "-" and text[-3:].isdigit() and set(text[:-4]) <= set("abc")


BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 997,
    "hidden_size": 384,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
}


def test_vectors_equal_those_of_the_cpu() -> None:
    config = BertConfig.from_hf(BERT)
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 997, (n,), generator=generator).tolist() for n in (1, 7, 64, 65, 300, 512, 3)]
    vectors = {}
    for device, dtype in (("cpu", "float32"), ("cuda", "float32"), ("cuda", "bfloat16")):
        options = EngineOptions(device=device, dtype=dtype).resolve(config)  # type: ignore[arg-type]
        weights = BertWeights.plan(config, options, {})
        noise = torch.Generator().manual_seed(2)
        for name, target in weights.targets.items():
            made = torch.randn(target.shape, generator=noise) / math.sqrt(target.shape[-1])
            target.copy_(1 + made if "LayerNorm.weight" in name else made)
        weights.arrival.finish()
        embedder = Embedder(config, options, weights)
        embedder.warm_up()
        embedder.submit(EmbedRequest("r", texts))
        answers = []
        while embedder.has_work():
            answers += [item for item in embedder.step() if item.finish_reason == "stop"]
        [answer] = answers
        vectors[device, dtype] = np.frombuffer(answer.vectors, np.float32).reshape(len(texts), -1)
    expected = vectors["cpu", "float32"]
    assert np.abs(vectors["cuda", "float32"] - expected).max() < 1e-4
    assert (vectors["cuda", "bfloat16"] * expected).sum(1).min() > 0.999


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [64, 1000, 4096])
def test_windows_at_the_sizes_of_mistral(window: int, dtype: torch.dtype) -> None:
    from stoker.kernels import ops

    torch.manual_seed(0)
    for lengths, contexts in (([1] * 8, [5000, 64, 65, 1, 4096, 4097, 900, 3000]), ([700, 1, 300], [6000, 5000, 300])):
        needed = [-(-context // 16) for context in contexts]
        table = torch.zeros(len(contexts), max(needed), dtype=torch.int32)
        for s, blocks in enumerate((torch.randperm(sum(needed)) + 1).split(needed)):
            table[s, : len(blocks)] = blocks
        cache = torch.randn(sum(needed) + 1, 2, 16, 8, 128, dtype=dtype)
        q = torch.randn(sum(lengths), 32, 128, dtype=dtype)
        start = torch.tensor([0, *lengths]).cumsum(0).int()
        where = (q, cache, table, start, torch.tensor(contexts).int())
        expected = reference.paged_attention(
            *(part.double() if part.is_floating_point() else part for part in where), 0.1, window
        )
        found = ops.paged_attention(*(part.cuda() for part in where), 0.1, window)
        limit = 2e-2 if dtype == torch.bfloat16 else 2e-4
        torch.testing.assert_close(found.double().cpu(), expected, rtol=limit, atol=limit)


def test_penalties_and_allowed_tokens_at_a_large_vocabulary() -> None:
    from stoker.kernels import ops

    torch.manual_seed(0)
    rows, vocab = 9, 128256
    logits, seen = torch.randn(rows, vocab), torch.randint(0, 3, (rows, vocab)).int()
    seen += reference.SEEN_IN_PROMPT * (torch.rand(rows, vocab) < 0.1).int()
    slots = torch.tensor([0, 1, -1, 3, 4, 5, -1, 7, 8]).int()
    penalties = torch.rand(3, rows) + 0.5
    allowed = torch.randint(-(2**31), 2**31, (rows, vocab // 32)).int()
    for bits in (None, allowed):
        expected = logits.clone()
        reference.steer(expected, seen, slots, *penalties, bits)
        found = logits.cuda()
        ops.steer(found, seen.cuda(), slots.cuda(), *penalties.cuda(), None if bits is None else bits.cuda())
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_normed_heads_before_the_rotation(dtype: torch.dtype) -> None:
    from stoker.kernels import ops

    torch.manual_seed(0)
    for count in (3, 300):
        q, k, v = (torch.randn(count, heads, 128, dtype=dtype) for heads in (32, 8, 8))
        cos_sin, positions = torch.rand(4096, 128), torch.randint(0, 4096, (count,))
        cache, slots = torch.zeros(40, 2, 16, 8, 128, dtype=dtype), torch.randperm(40 * 16)[:count]
        norms = (1 + 0.1 * torch.randn(128, dtype=dtype), 1 + 0.1 * torch.randn(128, dtype=dtype), 1e-6)
        on_gpu = cache.cuda()
        expected = reference.rope_store(q, k, v, cos_sin, positions, cache, slots, norms)
        where = (part.cuda() for part in (q, k, v, cos_sin, positions))
        found = ops.rope_store(*where, on_gpu, slots.cuda(), (norms[0].cuda(), norms[1].cuda(), norms[2]))
        limit = 3e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found.cpu(), expected, rtol=limit, atol=limit)
        torch.testing.assert_close(on_gpu.cpu(), cache, rtol=limit, atol=limit)
