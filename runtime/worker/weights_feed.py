"""Streams one model's chunks from store to ring to engine; fetching starts before the engine exists."""

import asyncio
import threading
import time
from typing import Any

from stoker.coldstart.fetch import Fetcher
from stoker.coldstart.manifest import Manifest
from stoker.coldstart.ring import Ring
from stoker.coldstart.store import ObjectStore
from stoker.runtime.worker.engine_link import EngineDied, EngineLink


class WeightsFeed:
    """Owns the fetch threads of one load. `start` fetches, `connect` begins to hand chunks to the engine."""

    def __init__(self, store: ObjectStore, manifest: Manifest, ring: Ring) -> None:
        self._fetcher = Fetcher(store, manifest, ring)
        self._started_ns = 0
        self._ended_ns = 0
        self._pump: threading.Thread | None = None

    @property
    def fetched_bytes(self) -> int:
        return self._fetcher.fetched_bytes

    @property
    def total_bytes(self) -> int:
        return self._fetcher.total_bytes

    def start(self) -> None:
        self._started_ns = time.monotonic_ns()
        self._fetcher.start()

    def connect(self, engine: EngineLink, model: str) -> "asyncio.Future[None]":
        """Resolves when every chunk was handed over; fails with the fetcher's typed error."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._pump = threading.Thread(target=self._run, args=(loop, done, engine, model), daemon=True, name="feed")
        self._pump.start()
        return done

    def release(self, slot: int) -> None:
        self._fetcher.release(slot)

    def cancel(self) -> None:
        self._fetcher.cancel()

    def phase(self) -> dict[str, Any]:
        return {
            "name": "fetch weights",
            "start_ns": self._started_ns,
            "end_ns": self._ended_ns or time.monotonic_ns(),
            **self._fetcher.summary(),
        }

    def _run(
        self, loop: asyncio.AbstractEventLoop, done: "asyncio.Future[None]", engine: EngineLink, model: str
    ) -> None:
        try:
            while ready := self._fetcher.next(timeout=None):
                frame = {"t": "chunk", "model": model, "chunk": ready.chunk, "slot": ready.slot}
                loop.call_soon_threadsafe(send_quietly, engine, frame)
            self._ended_ns = time.monotonic_ns()
            loop.call_soon_threadsafe(settle, done, None)
        except Exception as error:
            loop.call_soon_threadsafe(settle, done, error)


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
