"""What the cache hands out is what was published, whatever happened to its files; and it stays within its bound."""

import fcntl
import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.coldstart.chunk_cache import (
    BUSY,
    PARTIAL,
    ChunkCache,
    Entry,
    chunk_name,
    domain_of,
    lock_file,
    scan,
    victims,
)
from stoker.coldstart.manifest import Chunk
from stoker.coldstart.publish import publish
from stoker.coldstart.store import ReadWatch
from tests.coldstart.fetching import expected, fetch_all, fetch_and_report

URL = "s3://models/llama"
PLENTY = 1 << 30


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def cached(fault_server, published, tmp_path):
    """A store, and a function that loads from it through a fresh view of one cache folder."""
    store = published.serve(fault_server)

    def load(max_bytes: int = PLENTY, **options):
        before = len(fault_server.ranges)
        cache = ChunkCache(tmp_path / "cache", max_bytes, store.url)
        found, summary = fetch_and_report(store, published.manifest, cache=cache, **options)
        assert found == expected(published)
        return len(fault_server.ranges) - before, summary

    load.folder, load.chunks = tmp_path / "cache", len(published.manifest.chunks)  # type: ignore[attr-defined]
    return load


def test_the_second_load_asks_the_store_for_nothing(cached, published):
    assert cached()[0] == cached.chunks
    assert len(files(cached.folder)) == cached.chunks
    ranges, summary = cached()
    assert ranges == 0
    assert list(summary["sources"]) == ["cache"] and summary["sources"]["cache"]["bytes"] == summary["bytes"]


def test_one_load_mixes_sources(cached):
    cached()
    for path in files(cached.folder)[::3]:
        path.unlink()
    ranges, summary = cached()
    assert ranges == summary["sources"]["store"]["chunks"] == 8
    assert summary["sources"]["cache"]["chunks"] == 16


@pytest.mark.parametrize("damage", ["flipped", "short", "empty", "long"])
def test_damaged_files_are_deleted_and_fetched_again(cached, damage: str, caplog: pytest.LogCaptureFixture):
    cached()
    path = files(cached.folder)[5]
    good = path.read_bytes()
    damaged = {"flipped": bytes([good[0] ^ 1]) + good[1:], "short": good[:-1], "empty": b"", "long": good + b"x"}
    path.write_bytes(damaged[damage])
    assert cached()[0] == 1
    assert path.read_bytes() == good and "damaged" in caplog.text
    assert cached()[0] == 0


def test_an_unreadable_file_is_fetched(cached):
    cached()
    path = files(cached.folder)[0]
    path.unlink()
    path.mkdir()
    assert cached()[0] == 1


def test_the_bound_is_kept_and_the_oldest_go_first(tmp_path: Path, write_model, fault_server):
    import torch

    from tests.coldstart.conftest import Published

    shown = {}
    for name in ("one", "two", "three"):
        source = write_model({"a": torch.randn(16, 1024)}, name=name)
        shown[name] = Published(source, tmp_path / f"{name}-store", {}, 4096)
    bound = 2 * shown["one"].manifest.total_bytes

    def load(name: str) -> int:
        before = len(fault_server.ranges)
        cache = ChunkCache(tmp_path / "cache", bound, "s3://models")
        store = shown[name].serve(fault_server)
        assert fetch_all(store, shown[name], cache=cache) == expected(shown[name])
        assert sum(entry.size for entry in scan(tmp_path / "cache")) <= bound
        for entry in scan(tmp_path / "cache"):
            os.utime(entry.path, (entry.used_at - 100, entry.used_at - 100))
        return len(fault_server.ranges) - before

    full = len(shown["one"].manifest.chunks)
    assert [load(name) for name in ("one", "two", "one", "three")] == [full, full, 0, full]
    assert [load(name) for name in ("one", "three")] == [0, 0]
    assert load("two") == full


def test_a_model_larger_than_the_cache_keeps_what_fits(cached):
    for _ in range(3):
        ranges, _ = cached(max_bytes=10 * 4096)
        assert sum(path.stat().st_size for path in files(cached.folder)) <= 10 * 4096
    assert cached.chunks - 11 <= ranges < cached.chunks


@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(0, 20)), max_size=12),
    st.integers(-50, 400),
    st.integers(0, 20),
)
def test_victims_are_the_oldest_and_enough(found: list[tuple[int, int]], excess: int, keep_from: int):
    entries = [Entry(Path(str(number)), size, used) for number, (size, used) in enumerate(found)]
    old = [entry for entry in entries if entry.used_at < keep_from]
    chosen = victims(entries, excess, keep_from)
    if chosen is None:
        assert sum(entry.size for entry in old) < excess
        return
    assert sum(entry.size for entry in chosen) >= max(0, excess) or excess <= 0
    assert all(entry in old for entry in chosen)
    spared = [entry.used_at for entry in entries if entry not in chosen]
    assert all(entry.used_at <= min(spared, default=99) for entry in chosen)
    assert sum(entry.size for entry in chosen[:-1]) < max(1, excess)


def make_chunk(checksum: int = 7, length: int = 8) -> Chunk:
    return Chunk(0, 0, length, checksum)


def test_a_chunk_is_claimed_once_until_it_is_let_go(tmp_path: Path):
    first, second = (ChunkCache(tmp_path, PLENTY, URL) for _ in range(2))
    claim = first.claim(make_chunk())
    assert claim is not BUSY
    assert second.claim(make_chunk()) is BUSY
    other = second.claim(make_chunk(8))
    assert other is not BUSY
    claim.abandon()
    again = second.claim(make_chunk())
    assert again is not BUSY
    for held in (again, other):
        held.abandon()


def test_a_finished_chunk_is_not_claimed_again(tmp_path: Path):
    cache = ChunkCache(tmp_path, PLENTY, URL)
    claim = cache.claim(make_chunk())
    assert claim is not BUSY
    claim.commit(memoryview(b"12345678"), make_chunk())
    assert cache.claim(make_chunk()) is BUSY
    assert [path.name for path in files(tmp_path)] == [chunk_name(make_chunk())]


def test_a_lock_on_a_renamed_file_is_not_a_claim(tmp_path: Path):
    """The race between opening a partial file and its owner's rename must not let two write to one file."""
    part = tmp_path / f"x{PARTIAL}"
    owner = lock_file(part)
    assert owner is not None
    late = os.open(part, os.O_RDWR)
    os.rename(part, tmp_path / "x")
    os.close(owner)
    fcntl.flock(late, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fresh = lock_file(part)
    assert fresh is not None and os.fstat(fresh).st_ino != os.fstat(late).st_ino
    os.close(fresh)
    os.close(late)


def test_two_loads_at_once_fetch_each_chunk_once(fault_server, published, tmp_path: Path):
    store = published.serve(fault_server)
    fault_server.on_range = lambda count: time.sleep(0.01)
    found: list[dict[int, bytes]] = []

    def load() -> None:
        found.append(fetch_all(store, published, cache=ChunkCache(tmp_path / "cache", PLENTY, store.url)))

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected(published)] * 2
    assert len(fault_server.ranges) == len(published.manifest.chunks)


def test_a_chunk_that_another_never_finishes_is_fetched_all_the_same(
    fault_server, published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("stoker.coldstart.fetch.LEAVE_IT_S", 0.2)
    store = published.serve(fault_server)
    cache = ChunkCache(tmp_path / "cache", PLENTY, store.url)
    stuck = cache.claim(published.manifest.chunks[0])
    assert stuck is not BUSY
    assert fetch_all(store, published, cache=cache) == expected(published)
    assert len(files(tmp_path / "cache")) == len(published.manifest.chunks)
    stuck.abandon()


def test_what_crashed_writers_left_is_deleted(tmp_path: Path):
    folder = tmp_path / domain_of(URL)
    folder.mkdir()
    (folder / f"dead{PARTIAL}").write_bytes(b"half")
    fd = lock_file(folder / f"alive{PARTIAL}")
    (folder / "whole").write_bytes(b"1234")
    assert [(entry.path.name, entry.size) for entry in scan(tmp_path)] == [("whole", 4)]
    assert [path.name for path in files(tmp_path)] == [f"alive{PARTIAL}", "whole"]
    assert fd is not None
    os.close(fd)


def test_a_folder_that_cannot_be_made_is_one_warning(
    fault_server, published, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").write_text("")
    store = published.serve(fault_server)
    cache = ChunkCache(tmp_path / "file" / "cache", PLENTY, store.url)
    assert fetch_all(store, published, cache=cache) == expected(published)
    assert caplog.text.count("loading without it") == 1


def test_buckets_share_nothing(tmp_path: Path):
    chunk, watch = make_chunk(), ReadWatch()
    mine, theirs = (ChunkCache(tmp_path, PLENTY, f"s3://{bucket}/a") for bucket in ("mine", "theirs"))
    import xxhash

    chunk = make_chunk(xxhash.xxh3_64_intdigest(b"12345678"))
    claim = mine.claim(chunk)
    assert claim is not BUSY
    claim.commit(memoryview(b"12345678"), chunk)
    into = memoryview(bytearray(8))
    assert not theirs.read(chunk, into, watch) and theirs.locate(chunk) is None
    assert ChunkCache(tmp_path, PLENTY, "s3://mine/another").read(chunk, into, watch) and bytes(into) == b"12345678"
    located = mine.locate(chunk)
    assert located and located.read_bytes() == b"12345678"


def test_models_of_a_bucket_share_equal_chunks(fault_server, write_model, tmp_path: Path):
    import torch

    from stoker.coldstart.file_store import FileStore

    base, tuned = torch.randn(64, 1024), torch.randn(16, 1024)
    manifests = []
    for name, tensors in (("base", {"a": base, "b": tuned}), ("tuned", {"a": base, "b": tuned + 1})):
        store = FileStore(tmp_path / f"{name}-store")
        manifests.append((store, publish(write_model(tensors, name=name), store, chunk_bytes=4096)))
    reports = []
    for store, manifest in manifests:
        cache = ChunkCache(tmp_path / "cache", PLENTY, "s3://bucket/any")
        reports.append(fetch_and_report(store, manifest, cache=cache)[1]["sources"])
    assert reports[1]["cache"]["chunks"] >= 63 and "cache" not in reports[0]
