"""What `stoker push` says of a source that is no model."""

import json
from pathlib import Path

import pytest

from benchmarks.models import random_model
from stoker.coldstart.repository import INDEX, SINGLE
from stoker.runtime.publishing import missing_parts, push_model
from stoker.runtime.spec import InvalidSpec

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def folder(tmp_path: Path, *names: str) -> Path:
    tmp_path.mkdir(exist_ok=True)
    for name in names:
        (tmp_path / name).write_text("{}")
    return tmp_path


def test_a_folder_that_is_no_model_is_told_what_it_lacks(tmp_path: Path) -> None:
    source = folder(tmp_path, "README.md", "pytorch_model.bin")
    with pytest.raises(
        InvalidSpec, match="lacks config.json, tokenizer.json, model.safetensors .*converted"
    ) as refused:
        push_model(source, (tmp_path / "store").as_uri())
    assert str(source) in str(refused.value) and "store URL" not in str(refused.value)
    assert not (tmp_path / "store").exists()


def test_an_adapter_without_its_config_is_told_what_it_lacks(tmp_path: Path) -> None:
    source = folder(tmp_path, "adapter_model.safetensors")
    with pytest.raises(InvalidSpec, match="no whole adapter: it lacks adapter_config.json"):
        push_model(source, (tmp_path / "store").as_uri())
    assert not (tmp_path / "store").exists()


def test_shards_need_an_index_and_all_of_them(tmp_path: Path) -> None:
    source = folder(tmp_path, "config.json", "tokenizer.json", *SHARDS)
    assert missing_parts(source) == [INDEX]
    (source / INDEX).write_text(json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": "third.safetensors"}}))
    assert missing_parts(source) == ["third.safetensors"]


def test_a_model_lacks_nothing(tmp_path: Path) -> None:
    source = random_model("tiny", tmp_path / "model")
    assert missing_parts(source) == []
    assert push_model(source, (tmp_path / "store").as_uri())["tensors"] > 0
    single = folder(tmp_path / "other", "config.json", "tokenizer.json", SINGLE, "more.safetensors")
    assert missing_parts(single) == []
