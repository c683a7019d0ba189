"""Publishing copies exactly what is needed, says how far it is, and never leaves a half-published model."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash

from stoker.coldstart.failures import ColdStartError, ObjectChanged, ObjectTruncated, StoreUnavailable
from stoker.coldstart.file_store import FileStore
from stoker.coldstart.manifest import MANIFEST_KEY, read_manifest
from stoker.coldstart.publish import publish
from stoker.coldstart.store import ObjectInfo, ReadWatch

SHARDS = ({"a": torch.arange(5000.0)}, {"b": torch.arange(3000, dtype=torch.int64)})


class RecordingStore:
    """A folder store that lists its writes, and fails or interferes at a chosen one."""

    def __init__(self, inner: FileStore) -> None:
        self.inner, self.url, self.writes = inner, inner.url, []
        self.fail_at: str | None = None
        self.before_write = lambda key: None

    def stat(self, key: str) -> ObjectInfo:
        return self.inner.stat(key)

    def read(self, key: str) -> bytes:
        return self.inner.read(key)

    def read_range(
        self, key: str, offset: int, into: memoryview, etag: str = "", watch: ReadWatch | None = None
    ) -> None:
        self.inner.read_range(key, offset, into, etag, watch)

    def write(self, key: str, data: bytes | Path) -> ObjectInfo:
        if key == self.fail_at:
            raise StoreUnavailable(key, None, "injected")
        self.before_write(key)
        self.writes.append(key)
        return self.inner.write(key, data)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self.inner.list(prefix)

    def delete(self, key: str) -> None:
        self.inner.delete(key)


@pytest.fixture
def store(tmp_path: Path) -> RecordingStore:
    return RecordingStore(FileStore(tmp_path / "store"))


def test_manifest_describes_what_is_stored(write_model, store: RecordingStore):
    source = write_model(*SHARDS)
    (source / "tokenizer.json").write_text('{"version": "1.0"}')
    manifest = publish(source, store, chunk_bytes=8192)
    assert store.writes[-1] == MANIFEST_KEY and read_manifest(store) == manifest
    assert set(manifest.documents) == {"config.json", "tokenizer.json"}
    for entry in [*manifest.files, *manifest.documents.values()]:
        data = store.read(entry.name)
        assert data == (source / entry.name).read_bytes()
        assert entry.digest == hashlib.sha256(data).hexdigest()
        assert store.stat(entry.name) == (entry.name, entry.size, entry.etag)
    for chunk in manifest.chunks:
        data = store.read(manifest.files[chunk.file].name)[chunk.offset : chunk.offset + chunk.length]
        assert chunk.checksum == xxhash.xxh3_64_intdigest(data) and len(data) == chunk.length <= 8192
    assert manifest.total_bytes == sum(t.nbytes for shard in SHARDS for t in shard.values())


def test_publishing_again_writes_nothing(write_model, store: RecordingStore):
    source = write_model(*SHARDS)
    first = publish(source, store)
    store.writes.clear()
    assert publish(source, store) == first and store.writes == []


def test_only_what_changed_is_written(write_model, store: RecordingStore):
    source = write_model(*SHARDS)
    first = publish(source, store)
    store.writes.clear()
    (source / "config.json").write_text('{"model_type": "other"}')
    second = publish(source, store)
    assert store.writes == ["config.json", MANIFEST_KEY] and second.revision != first.revision


def test_what_was_lost_or_damaged_in_the_store_is_written_again(write_model, store: RecordingStore):
    source = write_model(*SHARDS)
    first = publish(source, store)
    store.delete(first.files[0].name)
    (store.inner.folder / first.files[1].name).write_bytes(b"junk")
    (store.inner.folder / MANIFEST_KEY).write_bytes(b"junk")
    store.writes.clear()
    assert publish(source, store).revision == first.revision
    assert {entry.name for entry in first.files} < set(store.writes)


def test_revision_is_the_same_in_every_store(write_model, store: RecordingStore, tmp_path: Path):
    source = write_model(*SHARDS)
    other = publish(source, FileStore(tmp_path / "other"), chunk_bytes=4096)
    assert publish(source, store).revision == other.revision


def test_an_interrupted_publish_leaves_the_old_model(write_model, store: RecordingStore):
    source = write_model(*SHARDS)
    first = publish(source, store)
    (source / "config.json").write_text('{"model_type": "other"}')
    store.fail_at = "config.json"
    with pytest.raises(StoreUnavailable):
        publish(source, store)
    assert read_manifest(store) == first


def test_a_source_that_changes_meanwhile_is_refused(write_model, store: RecordingStore):
    source = write_model(*SHARDS)
    store.before_write = lambda key: (source / "config.json").write_text('{"x": 1}') if key == "config.json" else None
    with pytest.raises(ObjectChanged, match="config.json"):
        publish(source, store)
    assert MANIFEST_KEY not in store.writes


def test_progress_rises_to_the_total(write_model, store: RecordingStore):
    reports: list[tuple[int, int]] = []
    publish(write_model(*SHARDS), store, lambda done, total: reports.append((done, total)))
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert reports[-1][0] == reports[-1][1] > 0 and len({total for _, total in reports}) == 1


def test_a_bad_folder_is_refused_before_anything_is_written(write_model, store: RecordingStore):
    source = write_model(*SHARDS)
    shard = source / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ObjectTruncated, match="00002") as caught:
        publish(source, store)
    assert isinstance(caught.value, ColdStartError) and store.writes == []


def test_chunk_bytes_must_divide_the_block(write_model, store: RecordingStore):
    with pytest.raises(ValueError, match="divide"):
        publish(write_model(*SHARDS), store, chunk_bytes=1000)


def test_files_larger_than_a_block(write_model, store: RecordingStore):
    tensor = torch.arange(9_000_000, dtype=torch.int32)
    manifest = publish(write_model({"big": tensor}), store)
    assert len(manifest.chunks) == 3
    whole = store.read("model.safetensors")
    assert all(c.checksum == xxhash.xxh3_64_intdigest(whole[c.offset : c.offset + c.length]) for c in manifest.chunks)
