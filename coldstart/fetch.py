"""Fetches a model's chunks with parallel ranged reads into ring slots, each verified before it is handed out."""

import threading
import time
from collections import deque
from typing import Any, NamedTuple

import xxhash

from stoker.coldstart.failures import (
    ColdStartError,
    FetchCancelled,
    ObjectAltered,
    ObjectChanged,
    StoreUnavailable,
)
from stoker.coldstart.manifest import Chunk, Manifest
from stoker.coldstart.ring import Ring
from stoker.coldstart.store import ObjectStore, ReadWatch


class Ready(NamedTuple):
    """Chunk number `chunk` of the manifest is complete and verified at the start of ring slot `slot`."""

    chunk: int
    slot: int


class Fetcher:
    """`connections` threads take chunks in load order, each as soon as a slot is free; `next` and `release` belong to
    the consumer. The ring is this fetcher's alone until all slots are released or `cancel` has returned.

    A file whose ETag isn't the manifest's may still be the published one (copied, replicated): it is read under the
    ETag found at the first such answer, and the checksums decide.
    """

    def __init__(self, store: ObjectStore, manifest: Manifest, ring: Ring, *, connections: int = 8) -> None:
        largest = max((chunk.length for chunk in manifest.chunks), default=0)
        if largest > ring.slot_bytes:
            raise ValueError(f"a chunk of {largest} bytes doesn't fit a ring slot of {ring.slot_bytes}")
        self._store, self._manifest, self._ring = store, manifest, ring
        self._changed = threading.Condition()
        self._adopting = threading.Lock()
        self._free = deque(range(ring.slots))
        self._ready: deque[Ready] = deque()
        self._next_chunk = self._handed_out = 0
        self._failure: ColdStartError | None = None
        self._stop = threading.Event()
        self._etags = [entry.etag for entry in manifest.files]
        self._replaced: dict[int, str] = {}
        self._watches = [ReadWatch(self._stop) for _ in range(max(1, min(connections, len(manifest.chunks))))]
        self._threads = [
            threading.Thread(target=self._work, args=(watch,), name=f"stoker-fetch-{number}", daemon=True)
            for number, watch in enumerate(self._watches)
        ]
        self._started = self._finished = 0.0
        self.fetched_bytes = 0
        self.total_bytes = manifest.total_bytes

    def start(self) -> None:
        self._started = time.monotonic()
        for thread in self._threads:
            thread.start()

    def next(self, timeout: float | None = None) -> Ready | None:
        """The next chunk, or None when all have been handed out. Raises the fetch's error, or TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(self._has_answer, timeout):
                raise TimeoutError(f"no chunk within {timeout} s")
            if self._failure:
                raise self._failure
            if not self._ready:
                return None
            self._handed_out += 1
            return self._ready.popleft()

    def release(self, slot: int) -> None:
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()

    def cancel(self) -> None:
        """Returns when no thread touches the ring any more; `next` raises FetchCancelled from then on."""
        self._fail(FetchCancelled(self._store.url, None, "the fetch was cancelled"))
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def summary(self) -> dict[str, Any]:
        """`seconds` run until the last chunk was verified; `retries` counts repeated ranged reads."""
        return {
            "bytes": self.fetched_bytes,
            "seconds": (self._finished or time.monotonic()) - self._started,
            "connections": len(self._threads),
            "retries": sum(watch.retries for watch in self._watches),
        }

    def _has_answer(self) -> bool:
        return bool(self._failure or self._ready or self._handed_out == len(self._manifest.chunks))

    def _work(self, watch: ReadWatch) -> None:
        try:
            while (task := self._take()) is not None:
                chunk = self._manifest.chunks[task.chunk]
                self._read_verified(chunk, self._ring.slot(task.slot)[: chunk.length], watch)
                self._hand_out(task, chunk.length)
        except ColdStartError as error:
            self._fail(error)
        except Exception as error:
            self._fail(StoreUnavailable(self._store.url, None, f"unexpected {type(error).__name__}: {error}"))

    def _take(self) -> Ready | None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._free or self._all_taken())
            if self._failure or self._all_taken():
                return None
            self._next_chunk += 1
            return Ready(self._next_chunk - 1, self._free.popleft())

    def _all_taken(self) -> bool:
        return self._next_chunk == len(self._manifest.chunks)

    def _hand_out(self, task: Ready, length: int) -> None:
        with self._changed:
            self._ready.append(task)
            self.fetched_bytes += length
            if self.fetched_bytes == self.total_bytes:
                self._finished = time.monotonic()
            self._changed.notify_all()

    def _fail(self, error: ColdStartError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._finished = self._finished or time.monotonic()
            self._stop.set()
            self._changed.notify_all()

    def _read_verified(self, chunk: Chunk, into: memoryview, watch: ReadWatch) -> None:
        """A second read tells bytes damaged on the way from bytes damaged in the store."""
        for _ in range(2):
            self._read(chunk, into, watch)
            if xxhash.xxh3_64_intdigest(into) == chunk.checksum:
                return
            watch.retries += 1
        name, span = self._where(chunk)
        if chunk.file in self._replaced:
            raise ObjectChanged(name, span, f"it was replaced after it was published ({self._replaced[chunk.file]})")
        raise ObjectAltered(name, span, f"its checksum isn't the published {chunk.checksum:016x}")

    def _read(self, chunk: Chunk, into: memoryview, watch: ReadWatch) -> None:
        entry, etag = self._manifest.files[chunk.file], self._etags[chunk.file]
        try:
            self._store.read_range(entry.name, chunk.offset, into, etag, watch)
        except ObjectChanged as error:
            self._store.read_range(entry.name, chunk.offset, into, self._adopt(chunk, error), watch)

    def _adopt(self, chunk: Chunk, error: ObjectChanged) -> str:
        """The ETag the file has now, once per file; raises `error` when it changed again or isn't of the same size."""
        with self._adopting:
            if chunk.file not in self._replaced:
                found = self._store.stat(self._manifest.files[chunk.file].name)
                if found.size != self._manifest.files[chunk.file].size:
                    raise error
                self._replaced[chunk.file] = error.reason
                self._etags[chunk.file] = found.etag
            return self._etags[chunk.file]

    def _where(self, chunk: Chunk) -> tuple[str, tuple[int, int]]:
        name = self._manifest.files[chunk.file].name
        return f"{self._store.url}/{name}", (chunk.offset, chunk.offset + chunk.length)
