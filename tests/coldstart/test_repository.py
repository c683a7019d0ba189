"""Shards and index of a Hugging Face folder must tell the same story."""

import json
from pathlib import Path

import pytest
import torch

from stoker.coldstart.failures import ColdStartError, ManifestInvalid, ObjectMissing, UnsupportedModel
from stoker.coldstart.file_store import FileStore
from stoker.coldstart.repository import INDEX, scan

A = {"a": torch.zeros(2)}
B = {"b": torch.zeros(3), "c": torch.zeros(1)}
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def set_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_single_file(write_model):
    repository = scan(FileStore(write_model(A)))
    assert repository.shards == ["model.safetensors"] and repository.documents == ["config.json"]
    assert [tensor.name for tensor in repository.tensors] == ["a"]


def test_a_single_file_of_another_name(write_model):
    folder = write_model(A)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert scan(FileStore(folder)).shards == ["weights.safetensors"]


def test_shards_and_documents(write_model):
    folder = write_model(A, B)
    for name in ("tokenizer.json", "chat_template.jinja", "README.md"):
        (folder / name).write_text("{}")
    repository = scan(FileStore(folder))
    assert repository.shards == [FIRST, SECOND]
    assert {tensor.name: tensor.file for tensor in repository.tensors} == {"a": 0, "b": 1, "c": 1}
    assert repository.documents == ["config.json", "tokenizer.json", "chat_template.jinja"]


@pytest.mark.parametrize(
    ("weight_map", "kind", "message"),
    [
        ({"a": FIRST, "b": SECOND, "c": "model-00003.safetensors"}, ObjectMissing, "model-00003.*isn't there"),
        (
            {"a": FIRST, "b": FIRST, "c": SECOND},
            ManifestInvalid,
            f"tensor b is in {SECOND}, but the index says {FIRST}",
        ),
        ({"a": FIRST, "b": SECOND, "c": SECOND, "d": FIRST}, ManifestInvalid, "tensor d is in no shard"),
        ({"a": FIRST, "b": SECOND}, ManifestInvalid, "tensor c .* the index doesn't list it"),
        ({"a": "../../x", "b": SECOND}, ManifestInvalid, "relative path"),
        ({"a": 1}, ManifestInvalid, "weight_map"),
        ([], ManifestInvalid, "weight_map"),
    ],
)
def test_index_against_shards(write_model, weight_map: object, kind: type[ColdStartError], message: str):
    folder = write_model(A, B)
    set_index(folder, weight_map)
    with pytest.raises(kind, match=message):
        scan(FileStore(folder))


def test_a_tensor_in_two_shards(write_model):
    folder = write_model({**A, "d": torch.zeros(1)}, {**B, "a": torch.zeros(2)})
    with pytest.raises(ManifestInvalid, match=f"tensor a is also in {FIRST}"):
        scan(FileStore(folder))


def test_shards_without_an_index(write_model):
    folder = write_model(A, B)
    (folder / INDEX).unlink()
    with pytest.raises(ObjectMissing, match="2 safetensors files need an index"):
        scan(FileStore(folder))


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1, "a": 2}', "\udcff"])
def test_a_broken_config(write_model, text: str):
    folder = write_model(A)
    (folder / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ManifestInvalid, match="config.json"):
        scan(FileStore(folder))


def test_folders_that_are_no_model(tmp_path: Path):
    with pytest.raises(ObjectMissing, match="config.json"):
        scan(FileStore(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match="convert the weights to safetensors"):
        scan(FileStore(tmp_path))


def test_a_tied_head_is_an_alias_stored_or_not(write_model):
    embedding = {"model.embed_tokens.weight": torch.zeros(4, 2)}
    tied = {"tie_word_embeddings": True}
    for name, extra in (("absent", {}), ("stored", {"lm_head.weight": torch.zeros(4, 2)})):
        repository = scan(FileStore(write_model({**embedding, **extra}, name=name, config=tied)))
        assert repository.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
        assert [tensor.name for tensor in repository.tensors] == ["model.embed_tokens.weight"]
    untied = scan(FileStore(write_model({**embedding, "lm_head.weight": torch.zeros(4, 2)}, name="untied")))
    assert untied.aliases == {} and len(untied.tensors) == 2
