"""Streams one model's chunks from store to ring to engine; fetching starts before the engine exists."""

import asyncio
import threading
import time
from typing import Any

from stoker.coldstart.chunk_cache import ChunkCache
from stoker.coldstart.fetch import Fetcher
from stoker.coldstart.file_store import FileStore
from stoker.coldstart.limits import fetch_limit, network_bytes_s
from stoker.coldstart.manifest import Manifest
from stoker.coldstart.page_cache import resident_share
from stoker.coldstart.peers import PeerSource
from stoker.coldstart.ring import Ring
from stoker.coldstart.store import ObjectStore
from stoker.runtime.worker.engine_link import EngineDied, EngineLink

RESIDENT = 0.9
"""With this share of its files in the page cache a model is mapped; what is missing is read on the way."""


class WeightsFeed:
    """One load's weights. `start` fetches, `connect` begins to hand chunks to the engine. With `files` there is nothing
    to fetch: the engine maps those. Without `verify`, the engine compares the checksums."""

    def __init__(
        self,
        store: ObjectStore,
        manifest: Manifest,
        ring: Ring,
        cache: ChunkCache | None = None,
        peers: PeerSource | None = None,
        verify: bool = True,
    ) -> None:
        self.files = resident_files(store, manifest)
        self.total_bytes = manifest.total_bytes
        self._fetcher = None if self.files else Fetcher(store, manifest, ring, cache=cache, peers=peers, verify=verify)
        self._peers = peers
        self._local = isinstance(store, FileStore)
        self._started_ns = 0
        self._ended_ns = 0
        self._pump: threading.Thread | None = None

    @property
    def fetched_bytes(self) -> int:
        return self._fetcher.fetched_bytes if self._fetcher else 0

    @property
    def is_under_way(self) -> bool:
        """Nothing is left that wasn't asked for."""
        return self._fetcher is None or self._fetcher.all_asked_for

    @property
    def bytes_s(self) -> float:
        """How fast the store is; 0 where that isn't known."""
        if self._fetcher is None or self._local or not self._ended_ns:
            return 0.0
        return self.fetched_bytes / max(1e-9, self._fetcher.summary()["seconds"])

    def start(self) -> None:
        self._started_ns = time.monotonic_ns()
        if self._fetcher:
            self._fetcher.start()

    def connect(self, engine: EngineLink, model: str) -> "asyncio.Future[None]":
        """Resolves when every chunk was handed over; fails with the fetcher's typed error."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        if self._fetcher is None:
            done.set_result(None)
            return done
        arguments = (self._fetcher, loop, done, engine, model)
        self._pump = threading.Thread(target=self._run, args=arguments, daemon=True, name="feed")
        self._pump.start()
        return done

    def release(self, slot: int) -> None:
        if self._fetcher:
            self._fetcher.release(slot)

    def cancel(self) -> None:
        if self._fetcher:
            self._fetcher.cancel()
        if self._peers:
            self._peers.close()

    def phases(self) -> list[dict[str, Any]]:
        if self._fetcher is None:
            return []
        ended = self._ended_ns or time.monotonic_ns()
        summary = self._fetcher.summary()
        summary |= fetch_limit(summary, self._local, network_bytes_s())
        return [{"name": "fetch weights", "start_ns": self._started_ns, "end_ns": ended, **summary}]

    def _run(
        self,
        fetcher: Fetcher,
        loop: asyncio.AbstractEventLoop,
        done: "asyncio.Future[None]",
        engine: EngineLink,
        model: str,
    ) -> None:
        try:
            while ready := fetcher.next(timeout=None):
                frame = {"t": "chunk", "model": model, "chunk": ready.chunk, "slot": ready.slot}
                loop.call_soon_threadsafe(send_quietly, engine, frame)
            self._ended_ns = time.monotonic_ns()
            loop.call_soon_threadsafe(settle, done, None)
        except Exception as error:
            loop.call_soon_threadsafe(settle, done, error)


def resident_files(store: ObjectStore, manifest: Manifest) -> list[str]:
    """The model's files on this machine, when they lie there, are in memory and have checksums; otherwise none."""
    if not isinstance(store, FileStore) or not manifest.published:
        return []
    paths = [store.folder / entry.name for entry in manifest.files]
    middles = ((paths[chunk.file], chunk.offset + chunk.length // 2) for chunk in manifest.chunks)
    return [str(path) for path in paths] if resident_share(middles) >= RESIDENT else []


def settle(future: "asyncio.Future[None]", error: Exception | None) -> None:
    if future.done():
        return
    if error:
        future.set_exception(error)
    else:
        future.set_result(None)


def send_quietly(engine: EngineLink, frame: dict[str, Any]) -> None:
    """A dead engine is reported by its link; the feed only must not crash the loop."""
    try:
        engine.send(frame)
    except EngineDied:
        return
