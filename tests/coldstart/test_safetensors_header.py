"""A header is trusted only after everything in it agrees with everything else, and with the file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, save, save_file

from stoker.coldstart.failures import ManifestInvalid, ObjectTruncated
from stoker.coldstart.file_store import FileStore
from stoker.coldstart.manifest import ITEM_BYTES, TensorEntry
from stoker.coldstart.safetensors_header import MAX_HEADER_BYTES, HeaderInvalid, parse_header
from stoker.coldstart.safetensors_header import read_header as read_found_header

TELLING_BYTES = list(b'0123456789"{}[]:,aUF\x00\xff ')
A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def read_header(store: FileStore, key: str, file: int) -> list[TensorEntry]:
    return read_found_header(store, store.stat(key), file)


def write(folder: Path, header: Any, data: bytes = b"", length: int | None = None) -> FileStore:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    (folder / "m.safetensors").write_bytes(size.to_bytes(8, "little") + text + data)
    return FileStore(folder)


def test_reads_what_the_library_writes(tmp_path: Path):
    tensors = {"b": torch.zeros(3, 4), "a": torch.tensor(1.5), "e": torch.empty(0, 7).half(), "f": torch.ones(5).bool()}
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    found = read_header(FileStore(tmp_path), "m.safetensors", 3)
    raw = (tmp_path / "m.safetensors").read_bytes()
    assert {tensor.name: tensor.shape for tensor in found} == {name: tuple(t.shape) for name, t in tensors.items()}
    for tensor in found:
        expected = tensors[tensor.name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert tensor.file == 3 and raw[tensor.offset : tensor.offset + tensor.length] == expected


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        ({}, b"", 0, "header can't be 0 bytes"),
        ({}, b"", 1 << 63, "header can't be"),
        ({}, b"", MAX_HEADER_BYTES + 1, "header can't be"),
        ({}, b"", 3, "header can't be 3 bytes long"),
        (b'{"\xff\xfe": 1}', b"", None, "not UTF-8 JSON"),
        (b"[1, 2]", b"", None, "not a JSON object"),
        (b'{"a": ', b"", None, "not UTF-8 JSON"),
        (b"[" * 100_000, b"", None, "not UTF-8 JSON"),
        (b'{"a": {"dtype": "U8", "shape": [0], "shape": [0], "data_offsets": [0, 0]}}', b"", None, "shape is listed"),
        ({"a": A, "b": {**A, "data_offsets": [4, 12]}}, bytes(12), None, "b overlaps"),
        ({"a": A, "b": {**A, "data_offsets": [12, 20]}}, bytes(20), None, "b leaves a gap"),
        ({"a": {**A, "data_offsets": [8, 16]}}, bytes(16), None, "a leaves a gap"),
        ({"a": A}, bytes(9), None, "1 bytes after the last tensor"),
        ({"a": {**A, "dtype": "F33"}}, bytes(8), None, "unknown dtype 'F33'"),
        ({"a": {**A, "dtype": ["F32"]}}, bytes(8), None, "unknown dtype"),
        ({"a": {**A, "shape": [3]}}, bytes(8), None, "can't have 8 bytes"),
        ({"a": {**A, "shape": [-2]}}, bytes(8), None, "shape"),
        ({"a": {**A, "shape": [2.0]}}, bytes(8), None, "shape"),
        ({"a": {**A, "data_offsets": [8, 0]}}, bytes(8), None, "can't have -8"),
        ({"a": {**A, "data_offsets": [0, 8, 9]}}, bytes(8), None, "data_offsets"),
        ({"a": {**A, "data_offsets": [False, 8]}}, bytes(8), None, "data_offsets"),
        ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8), None, "needs dtype"),
        ({"a": 5}, bytes(8), None, "needs dtype"),
    ],
)
def test_contradictions_are_named(tmp_path: Path, header: Any, data: bytes, length: int | None, message: str):
    store = write(tmp_path, header, data, length)
    with pytest.raises(ManifestInvalid, match=message) as caught:
        read_header(store, "m.safetensors", 0)
    assert caught.value.object.endswith("/m.safetensors")


def test_a_tensor_listed_twice(tmp_path: Path):
    text = json.dumps({"a": A})
    store = write(tmp_path, (text[:-1] + "," + text[1:]).encode(), bytes(8))
    with pytest.raises(ManifestInvalid, match="a is listed twice"):
        read_header(store, "m.safetensors", 0)


def test_a_cut_file_is_truncated_and_a_tiny_one_is_not_safetensors(tmp_path: Path):
    store = write(tmp_path, {"a": A}, bytes(7))
    with pytest.raises(ObjectTruncated, match="announces"):
        read_header(store, "m.safetensors", 0)
    (tmp_path / "m.safetensors").write_bytes(b"1234567")
    with pytest.raises(ManifestInvalid, match="7 bytes"):
        read_header(store, "m.safetensors", 0)


def test_a_header_without_tensors_is_an_empty_model(tmp_path: Path):
    assert read_header(write(tmp_path, {"__metadata__": {"format": "pt"}}), "m.safetensors", 0) == []


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_headers_never_pass_where_the_library_refuses(data: st.DataObject):
    """Differential: whatever bytes are changed, we raise our own error or read exactly what the library reads."""
    good = save({"one": torch.arange(6.0).view(2, 3), "two": torch.arange(3, dtype=torch.int8)})
    length = int.from_bytes(good[:8], "little")
    header = bytearray(good[8 : 8 + length])
    for _ in range(data.draw(st.integers(1, 3))):
        header[data.draw(st.integers(0, length - 1))] = data.draw(
            st.sampled_from(list(b'0123456789"{}[]:,aUF\x00\xff '))
        )
    body = good[8 + length :]
    try:
        ours = parse_header(header, 0, 0)
        assert max((tensor.offset + tensor.length for tensor in ours), default=0) == len(body)
    except (HeaderInvalid, AssertionError):
        return
    try:
        theirs = load(good[:8] + bytes(header) + body)
    except (SafetensorError, KeyError) as error:
        # Elsewhere it may be stricter (metadata that isn't text, dtypes its torch side lacks), not about positions.
        assert not any(kind in str(error) for kind in ("InvalidOffset", "TensorInvalidInfo", "IncompleteBuffer"))
        return
    assert {tensor.name for tensor in ours} == set(theirs)
    for tensor in ours:
        raw = theirs[tensor.name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert body[tensor.offset : tensor.offset + tensor.length] == raw


def test_item_sizes_match_torch():
    from stoker.coldstart.upload import DTYPES

    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ITEM_BYTES
