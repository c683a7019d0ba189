"""A whole load in this process: fetched, placed and waited for. Agent and engine do the same from two processes."""

from collections.abc import Mapping

import torch

from stoker.coldstart.fetch import Fetcher
from stoker.coldstart.manifest import Manifest
from stoker.coldstart.ring import Ring
from stoker.coldstart.store import ObjectStore
from stoker.coldstart.upload import Uploader, mark


def load(
    store: ObjectStore,
    manifest: Manifest,
    targets: Mapping[str, torch.Tensor],
    *,
    connections: int = 8,
    ring_slots: int = 8,
) -> None:
    """Raises a ColdStartError; the targets' content is then undefined."""
    uploader = Uploader(manifest, targets)
    ring = Ring.create(ring_slots, max((chunk.length for chunk in manifest.chunks), default=1))
    fetcher = Fetcher(store, manifest, ring, connections=connections)
    try:
        fetcher.start()
        while (ready := fetcher.next()) is not None:
            uploader.place(ready.chunk, ring.slot(ready.slot))
            if copied := mark(uploader.device):
                copied.synchronize()
            fetcher.release(ready.slot)
        uploader.finish()
    finally:
        fetcher.cancel()
        ring.close()
