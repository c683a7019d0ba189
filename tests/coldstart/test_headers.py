"""A model without a manifest loads by its headers, and says that nothing vouches for its bytes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.coldstart.chunk_cache import ChunkCache
from stoker.coldstart.device_check import DeviceCheck
from stoker.coldstart.failures import ObjectChanged
from stoker.coldstart.file_store import FileStore
from stoker.coldstart.headers import describe, read_or_describe
from stoker.coldstart.manifest import UNPUBLISHED, Manifest, read_documents
from stoker.coldstart.s3_store import S3Store
from tests.coldstart.fault_server import BUCKET, FaultServer
from tests.coldstart.fetching import fetch_and_report
from tests.coldstart.whole_load import load

SHARDS = (
    {"model.embed_tokens.weight": torch.randn(50, 64), "model.layers.0.w": torch.randn(40, 64).half()},
    {"model.layers.1.w": torch.randn(30, 64).bfloat16(), "model.norm.weight": torch.randn(64)},
    {"lm_head.weight": torch.randn(50, 64)},
)


def serve(server: FaultServer, folder: Path) -> S3Store:
    """An unpublished Hugging Face folder in a bucket."""
    for path in folder.iterdir():
        server.objects[path.name] = path.read_bytes()
        server.etags[path.name] = f'"{path.name} 1"'
    return S3Store(BUCKET, retry_budget_s=2)


def tensors_of(manifest: Manifest, chunks: dict[int, bytes]) -> dict[str, bytes]:
    files = [bytearray(entry.size) for entry in manifest.files]
    for number, data in chunks.items():
        chunk = manifest.chunks[number]
        files[chunk.file][chunk.offset : chunk.offset + chunk.length] = data
    return {t.name: bytes(files[t.file][t.offset : t.offset + t.length]) for t in manifest.tensors}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_every_tensor_arrives(fault_server, write_model):
    store = serve(fault_server, write_model(*SHARDS))
    manifest = read_or_describe(store)
    assert not manifest.published and Manifest.unpack(manifest.pack()) == manifest
    found, summary = fetch_and_report(store, manifest)
    everything = {name: tensor for shard in SHARDS for name, tensor in shard.items()}
    assert tensors_of(manifest, found) == {name: raw(tensor) for name, tensor in everything.items()}
    assert summary["checked"] == "length and version"


def test_it_takes_one_read_per_header(fault_server, write_model):
    store = serve(fault_server, write_model(*SHARDS))
    describe(store)
    assert len(fault_server.ranges) == len(SHARDS)
    assert all(header["if-match"] for header in fault_server.headers)


def test_a_manifest_is_preferred(published):
    assert read_or_describe(published.store) == published.manifest
    assert published.manifest.published


def test_documents_are_read_in_the_version_that_was_seen(fault_server, write_model):
    store = serve(fault_server, write_model(*SHARDS))
    manifest = describe(store)
    assert read_documents(store, manifest)["config.json"] == fault_server.objects["config.json"]
    assert manifest.documents["config.json"].digest == UNPUBLISHED + '"config.json 1"'
    fault_server.etags["config.json"] = '"config.json 2"'
    with pytest.raises(ObjectChanged):
        read_documents(store, manifest)


def test_the_revision_follows_the_versions(fault_server, write_model):
    store = serve(fault_server, write_model(*SHARDS))
    first = describe(store).revision
    assert describe(store).revision == first
    fault_server.etags["model-00002-of-00003.safetensors"] = '"other"'
    assert describe(store).revision != first


def test_a_change_in_mid_load_is_never_taken_for_a_copy(fault_server, write_model):
    """With checksums another version of equal bytes will do; without them it must not."""
    store = serve(fault_server, write_model(*SHARDS))
    manifest = describe(store)
    fault_server.etags[manifest.files[0].name] = '"copied"'
    with pytest.raises(ObjectChanged) as caught:
        fetch_and_report(store, manifest)
    assert caught.value.range


def test_unchecked_bytes_are_not_cached(fault_server, write_model, tmp_path: Path):
    store = serve(fault_server, write_model(*SHARDS))
    manifest = describe(store)
    cache = ChunkCache(tmp_path / "cache", 1 << 30, store.url)
    fetch_and_report(store, manifest, cache=cache)
    assert not (tmp_path / "cache").exists()
    assert cache.locate(manifest.chunks[0]) is None


def test_a_check_on_the_device_has_nothing_to_compare(write_model):
    store = FileStore(write_model(SHARDS[1]))
    manifest = describe(store)
    targets = {name: torch.zeros_like(tensor) for name, tensor in SHARDS[1].items()}
    load(store, manifest, targets)
    assert all(torch.equal(targets[name], tensor) for name, tensor in SHARDS[1].items())
    assert DeviceCheck(manifest, targets).run() == []


def test_from_a_real_store(s3_endpoint: str, write_model, tmp_path: Path):
    import uuid

    store: Any = S3Store("models", uuid.uuid4().hex)
    folder = write_model(*SHARDS)
    for path in folder.iterdir():
        store.write(path.name, path)
    manifest = read_or_describe(store)
    found, _ = fetch_and_report(store, manifest)
    assert tensors_of(manifest, found)["model.norm.weight"] == raw(SHARDS[1]["model.norm.weight"])
    assert describe(FileStore(folder)).tensors == manifest.tensors
