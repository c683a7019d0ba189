"""The encoder against transformers and sentence-transformers' recipe: on random weights, and on the real MiniLM."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from stoker.coldstart.failures import UnsupportedModel
from stoker.runtime.architecture import pooling_mode
from stoker.runtime.encoder.bert import UNUSED, BertConfig, BertWeights
from stoker.runtime.encoder.embedder import Embedder
from stoker.runtime.engine.options import EngineOptions
from stoker.runtime.engine.request import EmbedRequest

TINY = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}


def embedder(hf_config: dict[str, Any], state: dict[str, torch.Tensor], **options: Any) -> Embedder:
    config = BertConfig.from_hf(hf_config, options.pop("pooling", None))
    resolved = EngineOptions(**options).resolve(config)
    unused = {name: tensor.numel() for name, tensor in state.items() if name in UNUSED}
    weights = BertWeights.plan(config, resolved, unused)
    assert weights.targets.keys() == state.keys()
    for name, target in weights.targets.items():
        target.copy_(state[name].view(target.shape))
    weights.arrival.finish()
    return Embedder(config, resolved, weights)


def theirs(hf_config: dict[str, Any]) -> Any:
    from transformers import BertConfig as TheirConfig
    from transformers import BertModel

    torch.manual_seed(3)
    model = BertModel(TheirConfig(**hf_config)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@torch.inference_mode()
def expected(model: Any, text: list[int], pooling: str = "mean") -> np.ndarray:
    """One text at a time: transformers' hidden states, pooled, to unit length."""
    hidden = model(torch.tensor([text])).last_hidden_state[0].double()
    vector = hidden[0] if pooling == "cls" else hidden.mean(0)
    return (vector / vector.norm()).numpy()


def run(embedder: Embedder, requests: dict[str, list[list[int]]]) -> dict[str, np.ndarray]:
    for name, texts in requests.items():
        embedder.submit(EmbedRequest(name, texts))
    answers = {}
    while embedder.has_work():
        for item in embedder.step():
            assert item.finish_reason == "stop", item.error
            assert item.prompt_tokens == sum(map(len, requests[item.request_id]))
            values = np.frombuffer(item.vectors, np.float32)
            answers[item.request_id] = values.reshape(len(requests[item.request_id]), -1)
    return answers


def texts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(61) for _ in range(rng.randint(1, 40))] for _ in range(count)]


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_equal_those_of_transformers(pooling: str) -> None:
    model = theirs(TINY)
    modes = {"pooling_mode_cls_token": pooling == "cls", "pooling_mode_mean_tokens": pooling == "mean"}
    ours = embedder(TINY, model.state_dict(), token_budget=100, pooling=modes)
    requests = {"a": texts(7), "b": texts(1, seed=1), "c": texts(3, seed=2)}
    answers = run(ours, requests)
    for name, given in requests.items():
        for text, vector in zip(given, answers[name], strict=True):
            assert np.abs(vector - expected(model, text, pooling)).max() < 1e-5
    assert ours.stats()["steps"] > 1


def test_a_vector_does_not_depend_on_its_neighbours() -> None:
    model = theirs(TINY)
    ours = embedder(TINY, model.state_dict())
    [alone] = run(ours, {"alone": [[3, 1, 4]]})["alone"]
    together = run(ours, {"many": [*texts(5), [3, 1, 4]]})["many"][-1]
    np.testing.assert_allclose(alone, together, atol=1e-6)


def test_an_aborted_request_is_not_answered() -> None:
    ours = embedder(TINY, theirs(TINY).state_dict(), token_budget=64)
    ours.submit(EmbedRequest("gone", texts(8)))
    ours.step()
    ours.abort("gone")
    ours.abort("gone")
    assert not ours.has_work()
    assert set(run(ours, {"next": [[1, 2]]})) == {"next"}


def test_broken_values_fail_their_request_only() -> None:
    state = theirs(TINY).state_dict()
    state["embeddings.word_embeddings.weight"][60] = torch.nan
    ours = embedder(TINY, state)
    ours.submit(EmbedRequest("bad", [[1, 2], [60]]))
    ours.submit(EmbedRequest("good", [[1, 2]]))
    answers = {item.request_id: item for item in ours.step()}
    assert answers["bad"].finish_reason == "error" and "non-finite" in answers["bad"].error
    assert answers["good"].finish_reason == "stop" and len(answers["good"].vectors) == 4 * 32
    assert not ours.has_work()


@pytest.mark.parametrize(
    ("given", "named"),
    [([], "no text"), ([[]], "1 to 40"), ([[1] * 41], "1 to 40"), ([[61]], "0 to 60"), ([[-1]], "-1")],
)
def test_what_can_never_run_is_refused(given: list[list[int]], named: str) -> None:
    ours = embedder(TINY, theirs(TINY).state_dict())
    with pytest.raises(ValueError, match=named):
        ours.submit(EmbedRequest("r", given))
    assert not ours.has_work()


def test_other_poolings_are_refused_by_name() -> None:
    assert replace(BertConfig.from_hf(TINY), pooling="cls") == BertConfig.from_hf(
        TINY, {"pooling_mode_cls_token": True}
    )
    with pytest.raises(UnsupportedModel, match="pooling_mode_max_tokens"):
        pooling_mode({"pooling_mode_max_tokens": True})


SENTENCES = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "word " * 200,
    "x",
    "Zwölf Boxkämpfer jagen Viktor \U0001f600",
]


def test_minilm_equals_sentence_transformers(minilm_dir: Path) -> None:
    from transformers import BertModel

    hf_config = json.loads((minilm_dir / "config.json").read_text())
    pooling = json.loads((minilm_dir / "1_Pooling/config.json").read_text())
    ours = embedder(hf_config, load_file(minilm_dir / "model.safetensors"), pooling=pooling)
    tokenizer = Tokenizer.from_file(str(minilm_dir / "tokenizer.json"))
    tokenizer.no_padding()
    ids = [encoding.ids for encoding in tokenizer.encode_batch(SENTENCES)]
    vectors = run(ours, {"r": ids})["r"]
    model = BertModel.from_pretrained(minilm_dir).eval()
    for text, vector in zip(ids, vectors, strict=True):
        assert np.abs(vector - expected(model, text)).max() < 1e-5
    # The pair and its order are those of the model's published example.
    assert vectors[0] @ vectors[1] > 0.7 > 0.3 > vectors[0] @ vectors[2]
