import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from stoker.coldstart.failures import ColdStartError, ObjectTruncated, UnsupportedModel
from stoker.coldstart.fetch import Fetcher
from stoker.coldstart.manifest import Manifest
from stoker.coldstart.publish import publish
from stoker.coldstart.ring import Ring
from stoker.coldstart.store import ObjectStore, open_store
from stoker.runtime.engine.loading import Blueprint, ModelLoad, describe
from stoker.runtime.engine.request import GenerationRequest, SamplingParams
from stoker.runtime.engine.sizing import NotEnoughMemory

if TYPE_CHECKING:
    from conftest import TinyModel

OPTIONS = {"num_blocks": 8, "max_model_len": 64}


def published(folder: Path, tiny: "TinyModel", **extra: torch.Tensor) -> tuple[ObjectStore, Manifest]:
    source = folder / "source"
    source.mkdir()
    save_file({**tiny.state, **{name.replace("__", "."): t for name, t in extra.items()}}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(tiny.hf_config))
    store = open_store((folder / "store").as_uri())
    return store, publish(source, store, chunk_bytes=4096)


def load(store: ObjectStore, manifest: Manifest, **options: Any) -> ModelLoad:
    documents = {name: store.read(name) for name in manifest.documents}
    loading = ModelLoad(Blueprint.read(manifest.pack(), documents, {**OPTIONS, **options}))
    ring = Ring.create(2, 4096)
    fetcher = Fetcher(store, manifest, ring, connections=2)
    fetcher.start()
    while ready := fetcher.next(10):
        loading.place(ready.chunk, ring.slot(ready.slot))
        fetcher.release(ready.slot)
    ring.close()
    return loading


def greedy(engine: Any) -> list[int]:
    return engine.generate([GenerationRequest("r", [1, 2, 3], SamplingParams(10, temperature=0.0))])["r"]


@pytest.mark.parametrize("tied", [False, True])
def test_a_published_model_becomes_an_engine(tmp_path: Path, tiny: "TinyModel", tied: bool) -> None:
    small = type(tiny).random(seed=4, tie_word_embeddings=tied)
    store, manifest = published(tmp_path, small)
    loading = load(store, manifest)
    engine = loading.build()
    loading.complete()
    phases, facts = loading.timeline.records(), loading.facts(engine)
    assert greedy(engine) == greedy(small.engine())
    names = ["allocate weights", "upload weights", "allocate KV cache", "warm up"]
    assert [phase["name"] for phase in phases] == names
    assert phases[1]["bytes"] == manifest.total_bytes == sum(t.nbytes for t in small.state.values())
    assert facts["parameters"] == sum(tensor.numel() for tensor in small.state.values())
    assert (facts["device"], facts["dtype"], facts["kv_blocks"], facts["max_model_len"]) == ("cpu", "float32", 8, 64)
    assert facts["revision"] == manifest.revision


def test_a_missing_chunk_is_noticed(tmp_path: Path, tiny: "TinyModel") -> None:
    store, manifest = published(tmp_path, tiny)
    documents = {name: store.read(name) for name in manifest.documents}
    loading = ModelLoad(Blueprint.read(manifest.pack(), documents, OPTIONS))
    with pytest.raises(ObjectTruncated, match=r"model\.safetensors"):
        loading.complete()


def test_an_unexpected_tensor_is_named(tmp_path: Path, tiny: "TinyModel") -> None:
    store, manifest = published(tmp_path, tiny, model__extra=torch.zeros(3))
    with pytest.raises(UnsupportedModel, match=r"doesn't expect model\.extra"):
        load(store, manifest)


@pytest.mark.parametrize(
    ("documents", "named"),
    [
        ({}, "published without it"),
        ({"config.json": b"{"}, "config.json: not JSON"),
        ({"config.json": b"[]"}, "config.json: not a JSON object"),
        ({"config.json": b'{"model_type": "mamba"}'}, "model_type 'mamba'"),
    ],
)
def test_what_is_wrong_with_the_documents(
    tmp_path: Path, tiny: "TinyModel", documents: dict[str, bytes], named: str
) -> None:
    _, manifest = published(tmp_path, tiny)
    with pytest.raises(UnsupportedModel, match=named):
        ModelLoad(Blueprint.read(manifest.pack(), documents, OPTIONS))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ObjectTruncated("model.safetensors", (0, 5), "short"), "cold_start_error"),
        (NotEnoughMemory("short of 5 bytes"), "out_of_memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory"),
        (ValueError("max_model_len must be"), "model_error"),
        (ZeroDivisionError("oops"), "internal_error"),
    ],
)
def test_error_records(error: Exception, kind: str) -> None:
    record = describe(error)
    assert (record["type"], record["code"]) == (kind, type(error).__name__)
    assert str(error) in record["message"]
    assert ("facts" in record) == isinstance(error, ColdStartError)
