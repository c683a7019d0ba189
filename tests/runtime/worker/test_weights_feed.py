"""What a load's weights tell about themselves while they come, from a real S3 server."""

import time
from pathlib import Path

from benchmarks.models import random_model
from stoker.coldstart.manifest import read_manifest
from stoker.coldstart.publish import publish
from stoker.coldstart.ring import Ring
from stoker.coldstart.store import ObjectStore, open_store
from stoker.runtime.worker.weights_feed import WeightsFeed

CHUNK = 1 << 16


def published(url: str, folder: Path) -> ObjectStore:
    store = open_store(url)
    publish(random_model("tiny", folder), store, chunk_bytes=CHUNK)
    return store


def test_others_have_the_wires_once_every_chunk_is_asked_for(s3_endpoint: str, tmp_path: Path) -> None:
    store = published(f"s3://models/{tmp_path.name}", tmp_path / "model")
    manifest = read_manifest(store)
    assert len(manifest.chunks) > 3
    ring = Ring.create(len(manifest.chunks) - 1, CHUNK)
    feed = WeightsFeed(store, manifest, ring)
    assert feed._fetcher is not None and not feed.is_under_way
    feed.start()
    fetched = [feed._fetcher.next(20) for _ in range(ring.slots)]
    assert not feed.is_under_way and fetched[0], "one chunk waits for a slot"
    feed.release(fetched[0].slot)
    assert feed._fetcher.next(20) and feed.is_under_way
    deadline = time.monotonic() + 20
    while feed.fetched_bytes < feed.total_bytes:
        assert time.monotonic() < deadline
    feed.cancel()
    ring.close()


def test_what_lies_on_this_machine_has_no_wires(tmp_path: Path) -> None:
    store = published((tmp_path / "store").as_uri(), tmp_path / "model")
    for path in (tmp_path / "store").rglob("*.safetensors"):
        path.read_bytes()
    ring = Ring.create(2, CHUNK)
    feed = WeightsFeed(store, read_manifest(store), ring)
    assert feed.is_under_way and feed.bytes_s == 0
    ring.close()
