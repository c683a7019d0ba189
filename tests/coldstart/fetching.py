"""Whole fetches into memory, for comparison with the published bytes."""

from typing import Any

from stoker.coldstart.fetch import Fetcher
from stoker.coldstart.manifest import Manifest
from stoker.coldstart.ring import Ring


def drain(fetcher: Fetcher, ring: Ring, manifest: Any) -> dict[int, bytes]:
    found = {}
    while (ready := fetcher.next(20)) is not None:
        assert ready.chunk not in found
        found[ready.chunk] = bytes(ring.slot(ready.slot)[: manifest.chunks[ready.chunk].length])
        fetcher.release(ready.slot)
    return found


def expected(published: Any) -> dict[int, bytes]:
    files = [(published.folder / entry.name).read_bytes() for entry in published.manifest.files]
    return {i: files[c.file][c.offset : c.offset + c.length] for i, c in enumerate(published.manifest.chunks)}


def fetch_all(store: Any, published: Any, slots: int = 4, connections: int = 4, **options: Any) -> dict[int, bytes]:
    return fetch_and_report(store, published.manifest, slots, connections, **options)[0]


def fetch_and_report(
    store: Any, manifest: Manifest, slots: int = 4, connections: int = 4, **options: Any
) -> tuple[dict[int, bytes], dict[str, Any]]:
    """Also the fetcher's summary."""
    ring = Ring.create(slots, max(chunk.length for chunk in manifest.chunks))
    fetcher = Fetcher(store, manifest, ring, connections=connections, **options)
    try:
        fetcher.start()
        return drain(fetcher, ring, manifest), fetcher.summary()
    finally:
        fetcher.cancel()
        ring.close()
