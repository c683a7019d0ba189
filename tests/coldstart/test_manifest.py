"""A manifest reads back as it was written, or not at all."""

from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stoker.coldstart.failures import ManifestInvalid, ObjectMissing
from stoker.coldstart.file_store import FileStore
from stoker.coldstart.manifest import (
    CHUNK_BYTES,
    MANIFEST_KEY,
    Chunk,
    FileEntry,
    Manifest,
    TensorEntry,
    read_manifest,
    revision_of,
)

FILES = [FileEntry("m.safetensors", 108, "etag", "ab" * 32)]
CONFIG = FileEntry("config.json", 2, "etag", "cd" * 32)
GOOD = Manifest(
    revision=revision_of(FILES, [CONFIG]),
    files=FILES,
    chunks=[Chunk(0, 8, 64, 2**64 - 1), Chunk(0, 72, 36, 5)],
    tensors=[TensorEntry("a", "F32", (5, 5), 0, 8, 100), TensorEntry("e", "F32", (0, 3), 0, 108, 0)],
    documents={"config.json": CONFIG},
    aliases={"b": "a"},
)


def test_round_trip():
    assert Manifest.unpack(GOOD.pack()) == GOOD
    assert GOOD.total_bytes == 100


def test_read_manifest(tmp_path):
    store = FileStore(tmp_path)
    with pytest.raises(ObjectMissing, match="manifest.msgpack"):
        read_manifest(store)
    store.write(MANIFEST_KEY, GOOD.pack())
    assert read_manifest(store) == GOOD
    store.write(MANIFEST_KEY, GOOD.pack()[:-1])
    with pytest.raises(ManifestInvalid, match=f"{store.url}/manifest.msgpack"):
        read_manifest(store)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"revision": "0" * 64}, "revision doesn't match"),
        ({"chunks": GOOD.chunks[:1]}, "don't cover its tensors exactly once"),
        ({"chunks": [*GOOD.chunks, Chunk(0, 8, 4, 0)]}, "don't cover its tensors exactly once"),
        ({"chunks": [GOOD.chunks[0], Chunk(0, 72, 37, 5)]}, "outside m.safetensors"),
        ({"chunks": [Chunk(0, 8, CHUNK_BYTES + 1, 0)]}, "outside m.safetensors"),
        ({"chunks": [Chunk(1, 8, 100, 0)]}, "names file 1"),
        ({"tensors": [*GOOD.tensors, GOOD.tensors[1]]}, "listed twice"),
        ({"tensors": [GOOD.tensors[0]._replace(dtype="F33")]}, "unknown dtype F33"),
        ({"tensors": [GOOD.tensors[0]._replace(shape=(5, 6))]}, "can't have 100 bytes"),
        ({"tensors": [GOOD.tensors[0]._replace(shape=(-5, -5))]}, "can't have 100 bytes"),
        ({"aliases": {"b": "nobody"}}, "alias b names no tensor"),
        ({"files": [("m.safetensors", 108)]}, "not a manifest"),
    ],
)
def test_contradictions_are_named(change: dict[str, Any], message: str):
    with pytest.raises(ManifestInvalid, match=message):
        Manifest.unpack(replace(GOOD, **change).pack())


@pytest.mark.parametrize("value", [None, 5, [], {}, {"version": 1}, "text"])
def test_other_data_is_no_manifest(value: Any):
    with pytest.raises(ManifestInvalid, match="not a manifest"):
        Manifest.unpack(msgpack.packb(value))


def test_another_version_is_named():
    envelope = msgpack.unpackb(GOOD.pack()) | {"version": 2}
    with pytest.raises(ManifestInvalid, match="version is 2, this program reads 1"):
        Manifest.unpack(msgpack.packb(envelope))


@given(st.integers(0, len(GOOD.pack()) - 1), st.integers(1, 255))
@example(9, 0x01 ^ 0xC3)  # version: 1 -> true
@example(19, 0xCF ^ 0xD3)  # checksum: unsigned -> signed
def test_any_changed_byte_is_found(position: int, change: int):
    data = bytearray(GOOD.pack())
    data[position] ^= change
    with pytest.raises(ManifestInvalid):
        Manifest.unpack(bytes(data))


def test_revision_follows_content_not_place():
    moved = [FILES[0]._replace(etag="other")]
    assert revision_of(moved, [CONFIG]) == GOOD.revision == revision_of([CONFIG], FILES)
    assert revision_of(FILES, [CONFIG._replace(digest="ee" * 32)]) != GOOD.revision
