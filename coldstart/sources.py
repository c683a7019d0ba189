"""Where a chunk can come from, nearest first: this host's cache, another host's, the store. Each is checked."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash

from stoker.coldstart.failures import ObjectAltered, ObjectChanged
from stoker.coldstart.manifest import Chunk, Manifest
from stoker.coldstart.store import ObjectStore, ReadWatch

STORE, CACHE, PEER = "store", "cache", "peer"


class Peers(Protocol):
    """Other hosts that have chunks of this model."""

    def read(self, chunk: Chunk, into: memoryview, watch: ReadWatch) -> bool:
        """False, within a bounded time, when no peer gave bytes of the right checksum."""
        ...


def is_right(chunk: Chunk, data: memoryview, watch: ReadWatch | None = None) -> bool:
    """True also of a chunk without a published checksum, of which its length and version are all that is known, and of
    one that isn't to be verified here."""
    if watch and not watch.verify:
        return True
    began = time.monotonic()
    right = chunk.checksum is None or xxhash.xxh3_64_intdigest(data) == chunk.checksum
    if watch:
        watch.checked_s += time.monotonic() - began
    return right


class StoreSource:
    """Reads a published model's chunks from its store.

    A file whose ETag isn't the manifest's may still be the published one (copied, replicated): it is read under the
    ETag found at the first such answer, and the checksums decide. Without checksums a new ETag is an error.
    """

    def __init__(self, store: ObjectStore, manifest: Manifest) -> None:
        self._store, self._manifest = store, manifest
        self._adopting = threading.Lock()
        self._etags = [entry.etag for entry in manifest.files]
        self._replaced: dict[int, str] = {}

    def read(self, chunk: Chunk, into: memoryview, watch: ReadWatch) -> None:
        """A second read tells bytes damaged on the way from bytes damaged in the store. Raises a ColdStartError."""
        for _ in range(2):
            self._read_once(chunk, into, watch)
            if is_right(chunk, into, watch):
                return
            watch.retries += 1
        name, span = self._where(chunk)
        if chunk.file in self._replaced:
            raise ObjectChanged(name, span, f"it was replaced after it was published ({self._replaced[chunk.file]})")
        raise ObjectAltered(name, span, f"its checksum isn't the published {chunk.checksum:016x}")

    def _read_once(self, chunk: Chunk, into: memoryview, watch: ReadWatch) -> None:
        name = self._manifest.files[chunk.file].name
        try:
            self._store.read_range(name, chunk.offset, into, self._etags[chunk.file], watch)
        except ObjectChanged as error:
            if chunk.checksum is None:
                raise
            self._store.read_range(name, chunk.offset, into, self._adopt(chunk, error), watch)

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


@dataclass(slots=True)
class Tally:
    """What one kind of source delivered, and how long the reads of it took in all."""

    chunks: int = 0
    bytes: int = 0
    busy_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0


class Tallies:
    """Per source; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tallies: dict[str, Tally] = {}

    @contextmanager
    def timing(self, length: int) -> Iterator[list[str]]:
        """Counts the block for the source whose name it appends; nothing when it appends none."""
        found: list[str] = []
        start = time.monotonic()
        yield found
        end = time.monotonic()
        with self._lock:
            for name in found:
                tally = self._tallies.setdefault(name, Tally(first_s=start))
                tally.chunks, tally.bytes = tally.chunks + 1, tally.bytes + length
                tally.busy_s += end - start
                tally.last_s = end

    def report(self) -> dict[str, dict[str, Any]]:
        """`gb_s` is over the time from the source's first read to its last."""
        with self._lock:
            return {
                name: {
                    "bytes": tally.bytes,
                    "chunks": tally.chunks,
                    "gb_s": round(tally.bytes / max(tally.last_s - tally.first_s, 1e-9) / 1e9, 3),
                    "busy_s": round(tally.busy_s, 3),
                }
                for name, tally in sorted(self._tallies.items())
            }
