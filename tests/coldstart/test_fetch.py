"""Whatever the store and the consumer do: right bytes or one typed error, and no thread left behind."""

import shutil
import threading
import time
from typing import Any

import pytest
import torch

from stoker.coldstart.failures import (
    ColdStartError,
    FetchCancelled,
    ObjectAltered,
    ObjectChanged,
    ObjectMissing,
    ObjectTruncated,
    StoreUnavailable,
)
from stoker.coldstart.fetch import Fetcher
from stoker.coldstart.file_store import FileStore
from stoker.coldstart.ring import Ring
from tests.coldstart.fetching import drain, expected, fetch_all


@pytest.fixture(autouse=True)
def no_thread_left():
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("stoker-fetch")]


@pytest.mark.parametrize(("slots", "connections"), [(1, 1), (1, 8), (2, 8), (8, 1), (64, 8)])
def test_every_chunk_once_and_exact(published, slots: int, connections: int):
    assert len(published.manifest.chunks) > 20
    assert fetch_all(published.store, published, slots, connections) == expected(published)


def test_a_model_of_one_chunk_and_one_of_none(write_model, tmp_path):
    from stoker.coldstart.publish import publish

    for name, tensors in (("one", {"a": torch.ones(3)}), ("none", {"a": torch.ones(0)})):
        store = FileStore(tmp_path / f"{name}-store")
        manifest = publish(write_model(tensors, name=name), store)
        ring = Ring.create(2, 4096)
        fetcher = Fetcher(store, manifest, ring)
        fetcher.start()
        assert len(drain(fetcher, ring, manifest)) == len(manifest.chunks) == (name == "one")
        assert fetcher.next(0) is None
        fetcher.cancel()
        ring.close()


def test_no_slot_is_filled_before_it_is_free(published):
    ring = Ring.create(2, 4096)
    fetcher = Fetcher(published.store, published.manifest, ring, connections=8)
    fetcher.start()
    first, second = fetcher.next(10), fetcher.next(10)
    assert first and second and {first.slot, second.slot} == {0, 1}
    with pytest.raises(TimeoutError):
        fetcher.next(0.2)
    held = bytes(ring.slot(first.slot))
    time.sleep(0.05)
    assert bytes(ring.slot(first.slot)) == held
    fetcher.release(second.slot)
    third = fetcher.next(10)
    assert third and third.slot == second.slot
    # A consumer that never releases must not keep its owner from closing.
    start = time.monotonic()
    fetcher.cancel()
    assert time.monotonic() - start < 2
    ring.close()


def test_cancel_midway_wakes_the_consumer(published):
    ring = Ring.create(1, 4096)
    fetcher = Fetcher(published.store, published.manifest, ring)
    fetcher.start()
    assert fetcher.next(10)
    threading.Timer(0.1, fetcher.cancel).start()
    with pytest.raises(FetchCancelled):
        fetcher.next(30)
    fetcher.cancel()
    ring.close()


def test_cancel_before_start(published):
    ring = Ring.create(1, 4096)
    fetcher = Fetcher(published.store, published.manifest, ring)
    fetcher.cancel()
    with pytest.raises(FetchCancelled):
        fetcher.next(0)
    ring.close()


def test_progress_and_summary(published):
    ring = Ring.create(4, 4096)
    fetcher = Fetcher(published.store, published.manifest, ring, connections=3)
    assert (fetcher.fetched_bytes, fetcher.total_bytes) == (0, published.manifest.total_bytes)
    fetcher.start()
    drain(fetcher, ring, published.manifest)
    summary = fetcher.summary()
    assert fetcher.fetched_bytes == fetcher.total_bytes == summary["bytes"]
    assert summary["connections"] == 3 and summary["retries"] == 0 and 0 < summary["seconds"] < 30
    time.sleep(0.05)
    assert fetcher.summary()["seconds"] == summary["seconds"]
    fetcher.cancel()
    ring.close()


def test_a_ring_with_too_small_slots_is_refused(published):
    ring = Ring.create(2, 1024)
    with pytest.raises(ValueError, match="4096 bytes doesn't fit a ring slot of 1024"):
        Fetcher(published.store, published.manifest, ring)
    ring.close()


def failure(store: Any, published: Any) -> ColdStartError:
    with pytest.raises(ColdStartError) as caught:
        fetch_all(store, published)
    return caught.value


def test_a_missing_shard_an_altered_byte_and_a_short_file_each_have_their_error(published):
    shard = published.manifest.files[1].name
    path = published.folder / shard
    good = path.read_bytes()

    path.unlink()
    error = failure(published.store, published)
    assert type(error) is ObjectMissing and error.object == f"{published.store.url}/{shard}"

    path.write_bytes(good[:-1])
    error = failure(published.store, published)
    assert type(error) in (ObjectTruncated, ObjectChanged) and shard in error.object

    damaged = bytearray(good)
    damaged[-100] ^= 4
    path.write_bytes(damaged)
    error = failure(published.store, published)
    assert type(error) in (ObjectAltered, ObjectChanged) and shard in error.object and error.range


def test_a_byte_altered_under_the_same_version_is_found(fault_server, published):
    """Bit rot: the store doesn't notice, the checksum does."""
    store = published.serve(fault_server)
    shard = published.manifest.files[0].name
    chunk = next(c for c in published.manifest.chunks if c.file == 0)
    damaged = bytearray(fault_server.objects[shard])
    damaged[chunk.offset + 3] ^= 1
    fault_server.objects[shard] = bytes(damaged)
    error = failure(store, published)
    assert type(error) is ObjectAltered and error.object == f"s3://models/{shard}"
    assert error.range == (chunk.offset, chunk.offset + chunk.length)


def test_a_byte_flipped_on_the_way_is_read_again(fault_server, published):
    store = published.serve(fault_server)
    fault_server.faults.extend(["right", "flip", "right", "flip"])
    assert fetch_all(store, published, connections=1) == expected(published)


def test_a_receiver_that_takes_the_checksums_itself_gets_the_bytes_as_they_came(fault_server, published):
    fault_server.always = "flip"
    found = fetch_all(published.serve(fault_server), published, verify=False)
    assert found.keys() == expected(published).keys() and found != expected(published)


def test_bytes_flipped_every_time_are_an_error(fault_server, published):
    store = published.serve(fault_server)
    fault_server.always = "flip"
    assert type(failure(store, published)) is ObjectAltered


def test_a_short_object_behind_the_same_version(fault_server, published):
    store = published.serve(fault_server)
    shard = published.manifest.files[1].name
    fault_server.objects[shard] = fault_server.objects[shard][:-50]
    error = failure(store, published)
    assert type(error) is ObjectTruncated and error.object == f"s3://models/{shard}"


def test_a_copied_store_loads_although_its_versions_differ(published, tmp_path):
    shutil.copytree(published.folder, tmp_path / "copy", copy_function=shutil.copyfile)
    copied = FileStore(tmp_path / "copy")
    assert copied.stat(published.manifest.files[0].name).etag != published.manifest.files[0].etag
    assert fetch_all(copied, published) == expected(published)


def test_the_same_bytes_under_a_new_version_midway_still_load(fault_server, published):
    store = published.serve(fault_server)
    shard = published.manifest.files[0].name

    def replace(count: int) -> None:
        if count == 6:
            fault_server.etags[shard] = '"copied again"'

    fault_server.on_range = replace
    assert fetch_all(store, published) == expected(published)


def test_other_bytes_under_a_new_version_midway_are_never_mixed_in(fault_server, published):
    store = published.serve(fault_server)
    shard = published.manifest.files[0].name

    def replace(count: int) -> None:
        if count == 6:
            fault_server.objects[shard] = bytes(len(fault_server.objects[shard]))
            fault_server.etags[shard] = '"new"'

    fault_server.on_range = replace
    error = failure(store, published)
    assert type(error) is ObjectChanged and error.object == f"s3://models/{shard}"
    assert "replaced after it was published" in error.reason


def test_a_file_that_keeps_changing_is_an_error(fault_server, published):
    store = published.serve(fault_server)
    for entry in published.manifest.files:
        fault_server.on_range = lambda count, name=entry.name: fault_server.etags.update({name: f'"{count}"'})
        assert type(failure(store, published)) is ObjectChanged


def test_a_new_version_of_another_size_is_an_error(fault_server, published):
    store = published.serve(fault_server)
    shard = published.manifest.files[0].name
    fault_server.objects[shard] += b"more"
    fault_server.etags[shard] = '"new"'
    assert type(failure(store, published)) is ObjectChanged


def test_a_burst_of_faults_is_survived_and_counted(fault_server, published):
    store = published.serve(fault_server, retry_budget_s=20)
    fault_server.faults.extend(["503", "reset", "truncate", "429", "hang_up", "nothing"] * 3)
    ring = Ring.create(4, 4096)
    fetcher = Fetcher(store, published.manifest, ring, connections=4)
    fetcher.start()
    assert drain(fetcher, ring, published.manifest) == expected(published)
    assert fetcher.summary()["retries"] >= 9
    fetcher.cancel()
    ring.close()


def test_a_lasting_outage_is_an_error(fault_server, published):
    store = published.serve(fault_server, retry_budget_s=0.3)
    fault_server.faults.extend(["right"] * 5)
    fault_server.always = "503"
    error = failure(store, published)
    assert type(error) is StoreUnavailable and "SlowDown" in error.reason


def test_cancel_interrupts_a_stuck_connection(fault_server, published):
    store = published.serve(fault_server)
    fault_server.always = "stall"
    ring = Ring.create(4, 4096)
    fetcher = Fetcher(store, published.manifest, ring)
    fetcher.start()
    with pytest.raises(TimeoutError):
        fetcher.next(0.3)
    start = time.monotonic()
    fetcher.cancel()
    assert time.monotonic() - start < 3
    ring.close()


def test_an_error_ends_the_other_threads_waits_too(fault_server, published):
    """Seven connections back off after 503 for up to a minute; the eighth meets a final answer."""
    store = published.serve(fault_server, retry_budget_s=60)
    fault_server.faults.extend(["503"] * 7 + ["403"])
    fault_server.always = "503"
    start = time.monotonic()
    assert "AccessDenied" in failure(store, published).reason
    assert time.monotonic() - start < 10


def test_an_unforeseen_exception_surfaces_as_a_typed_error(published):
    class BrokenStore(FileStore):
        def read_range(self, *args: Any, **kwargs: Any) -> None:
            raise ZeroDivisionError("bug")

    error = failure(BrokenStore(published.folder), published)
    assert type(error) is StoreUnavailable and "ZeroDivisionError: bug" in error.reason
