"""Files that are mapped instead of read: the same bytes, every one of them checked, and typed errors."""

from pathlib import Path

import pytest
import torch

from stoker.coldstart.failures import FetchCancelled, ObjectAltered, ObjectMissing, ObjectTruncated
from stoker.coldstart.mapped_source import MappedSource, Window, by_window
from stoker.coldstart.upload import Uploader


def source_of(published) -> MappedSource:
    return MappedSource(published.manifest, [published.folder / entry.name for entry in published.manifest.files])


def load_mapped(published, targets: dict[str, torch.Tensor]) -> None:
    source = source_of(published)
    uploader = Uploader(published.manifest, targets)
    try:
        source.check(range(len(published.manifest.chunks)))
        source.deliver(uploader.place)
        uploader.finish()
        source.verify()
    finally:
        source.close()


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_the_parameters_are_those_of_the_files(published, dtype: torch.dtype | None):
    targets = published.targets(dtype) if dtype else published.targets()
    load_mapped(published, targets)
    assert all(targets[name].equal(value.to(targets[name].dtype)) for name, value in published.tensors.items())


@pytest.mark.parametrize("where", [0, -1])
def test_a_flipped_byte_in_any_chunk_is_found(published, where: int):
    chunk = published.manifest.chunks[where]
    name = published.manifest.files[chunk.file].name
    data = bytearray((published.folder / name).read_bytes())
    data[chunk.offset + chunk.length - 1] ^= 1
    (published.folder / name).write_bytes(data)
    with pytest.raises(ObjectAltered, match=name) as caught:
        load_mapped(published, published.targets())
    assert caught.value.range == (chunk.offset, chunk.offset + chunk.length)


def test_missing_and_shortened_files_are_refused_before_anything_is_copied(published):
    path = published.folder / published.manifest.files[1].name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ObjectTruncated, match=path.name):
        source_of(published)
    path.unlink()
    with pytest.raises(ObjectMissing, match=path.name):
        source_of(published)


def test_a_cancelled_delivery_ends(published):
    source = source_of(published)
    source.cancel()
    with pytest.raises(FetchCancelled):
        source.deliver(lambda chunk, data, pinned: None)
    source.close()


def test_no_chunk_crosses_a_window_and_windows_come_in_load_order(published):
    manifest = published.manifest
    for size in (64, 100, 4096, 1 << 30):
        windows = by_window(manifest, size)
        assert sorted(n for numbers in windows.values() for n in numbers) == list(range(len(manifest.chunks)))
        assert [numbers[0] for numbers in windows.values()] == sorted(numbers[0] for numbers in windows.values())
        for window, numbers in windows.items():
            for chunk in (manifest.chunks[n] for n in numbers):
                assert window.file == chunk.file
                assert window.start <= chunk.offset and chunk.offset + chunk.length <= window.stop
        spans: dict[int, list[Window]] = {}
        for window in windows:
            spans.setdefault(window.file, []).append(window)
        for found in spans.values():
            ordered = sorted(found)
            assert all(a.stop <= b.start for a, b in zip(ordered, ordered[1:], strict=False))


def test_mappings_end_with_the_source(published, tmp_path: Path):
    load_mapped(published, published.targets())
    assert str(published.folder) not in Path("/proc/self/maps").read_text()
