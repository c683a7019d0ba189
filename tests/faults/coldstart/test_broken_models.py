"""Models that contradict themselves, published or not: refused before a byte of weights is read, or loaded right."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from stoker.coldstart.failures import ColdStartError, ManifestInvalid, ObjectMissing, ObjectTruncated
from stoker.coldstart.file_store import FileStore
from stoker.coldstart.headers import read_or_describe
from stoker.coldstart.publish import publish
from stoker.coldstart.repository import INDEX
from stoker.coldstart.s3_store import S3Store
from stoker.coldstart.safetensors_header import MAX_HEADER_BYTES
from tests.coldstart.fault_server import BUCKET, FaultServer
from tests.coldstart.whole_load import load

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def folder(write_model: Any) -> Path:
    return write_model({EMBEDDING: torch.randn(40, 16)}, {"model.norm.weight": torch.randn(16)})


def serve(server: FaultServer, folder: Path) -> S3Store:
    for path in folder.iterdir():
        server.objects[path.name], server.etags[path.name] = path.read_bytes(), f'"{path.name}"'
    return S3Store(BUCKET, retry_budget_s=1)


def with_header(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def drop_a_shard(folder: Path) -> None:
    (folder / SECOND).unlink()


def list_shards_that_do_not_exist(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= {f"x{number}": f"model-{number:05}-of-00030.safetensors" for number in range(3, 31)}
    (folder / INDEX).write_text(json.dumps(index))


def put_a_tensor_in_another_shard(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = FIRST
    (folder / INDEX).write_text(json.dumps(index))


def overlap_tensors(folder: Path) -> None:
    entry = {"dtype": "F32", "shape": [4]}
    header = {EMBEDDING: {**entry, "data_offsets": [0, 16]}, "b": {**entry, "data_offsets": [8, 24]}}
    (folder / FIRST).write_bytes(with_header(header, bytes(24)))


def announce_a_giant_header(folder: Path) -> None:
    (folder / FIRST).write_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + bytes(1000))


def cut_a_shard(folder: Path) -> None:
    (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:-5])


def append_to_a_shard(folder: Path) -> None:
    (folder / FIRST).write_bytes((folder / FIRST).read_bytes() + b"more")


@pytest.mark.parametrize("way", ["published", "unpublished"])
@pytest.mark.parametrize(
    ("break_it", "kind", "where", "reason"),
    [
        (drop_a_shard, ObjectMissing, SECOND, "names this shard, but it isn't there"),
        (list_shards_that_do_not_exist, ObjectMissing, "model-00003-of-00030", "it isn't there"),
        (put_a_tensor_in_another_shard, ManifestInvalid, FIRST, "is in no shard, but the index says"),
        (overlap_tensors, ManifestInvalid, FIRST, "b overlaps the one before"),
        (announce_a_giant_header, ManifestInvalid, FIRST, "header can't be 16777217 bytes"),
        (cut_a_shard, ObjectTruncated, FIRST, "its header announces"),
        (append_to_a_shard, ManifestInvalid, FIRST, "4 bytes after the last tensor"),
    ],
    ids=lambda value: value.__name__ if callable(value) and not isinstance(value, type) else "",
)
def test_contradictions_are_refused(
    fault_server: FaultServer,
    folder: Path,
    tmp_path: Path,
    way: str,
    break_it: Callable[[Path], None],
    kind: type[ColdStartError],
    where: str,
    reason: str,
) -> None:
    break_it(folder)
    with pytest.raises(kind, match=reason) as caught:
        if way == "published":
            publish(folder, FileStore(tmp_path / "store"))
        else:
            read_or_describe(serve(fault_server, folder))
    assert type(caught.value) is kind and where in caught.value.object
    assert not (tmp_path / "store").exists()
    assert all(value.startswith("bytes=0-") for _, value in fault_server.ranges)


def test_a_header_file_over_the_limit_is_not_read(tmp_path: Path) -> None:
    """100 MB and more of header, really there (a sparse file)."""
    (tmp_path / "config.json").write_text("{}")
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write((MAX_HEADER_BYTES + 8).to_bytes(8, "little"))
        file.truncate(MAX_HEADER_BYTES + 100)
    with pytest.raises(ManifestInvalid, match="header can't be"):
        read_or_describe(FileStore(tmp_path))


def test_a_header_over_the_first_read_is_read_in_two(fault_server: FaultServer, write_model: Any) -> None:
    folder = write_model({"a": torch.ones(4)})
    long = {"__metadata__": {"note": "x" * (1 << 20)}, "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    (folder / "model.safetensors").write_bytes(with_header(long, raw_ones()))
    store = serve(fault_server, folder)
    manifest = read_or_describe(store)
    assert len(fault_server.ranges) == 2
    target = {"a": torch.zeros(4)}
    load(store, manifest, target)
    assert torch.equal(target["a"], torch.ones(4))


def raw_ones() -> bytes:
    return save({"a": torch.ones(4)})[-16:]


@pytest.mark.parametrize("stored", [False, True])
def test_tied_weights_fill_both_names(fault_server: FaultServer, write_model: Any, stored: bool) -> None:
    embedding = torch.randn(40, 16)
    tensors = {EMBEDDING: embedding, **({"lm_head.weight": embedding.clone()} if stored else {})}
    store = serve(fault_server, write_model(tensors, config={"tie_word_embeddings": True}))
    manifest = read_or_describe(store)
    targets = {EMBEDDING: torch.zeros(40, 16), "lm_head.weight": torch.zeros(40, 16)}
    load(store, manifest, targets)
    assert torch.equal(targets[EMBEDDING], embedding) and torch.equal(targets["lm_head.weight"], embedding)
    assert manifest.total_bytes == embedding.nbytes
