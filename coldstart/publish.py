"""Publishes a model folder into a store: files and documents first, the manifest last."""

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import xxhash

from stoker.coldstart.chunk_plan import Span, plan_chunks
from stoker.coldstart.failures import ManifestInvalid, ObjectChanged, ObjectMissing
from stoker.coldstart.file_store import FileStore
from stoker.coldstart.manifest import (
    CHUNK_BYTES,
    MANIFEST_KEY,
    Chunk,
    FileEntry,
    Manifest,
    read_manifest,
    revision_of,
)
from stoker.coldstart.repository import Repository, scan
from stoker.coldstart.store import ObjectInfo, ObjectStore

HASHING_THREADS = 4

Progress = Callable[[int, int], None]


class Digest(NamedTuple):
    """A local file's version, its SHA-256 in hex and the XXH3-64 of each of its spans."""

    found: ObjectInfo
    sha256: str
    checksums: dict[Span, int]


def publish(
    source: Path,
    store: ObjectStore,
    on_progress: Progress | None = None,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    layout: Callable[[ObjectStore], Repository] = scan,
) -> Manifest:
    """Checks the folder `source`, by default in Hugging Face's `layout`, copies it into `store`, writes its manifest.

    Reads in blocks of 16 MiB. What the store already holds unchanged is not sent again. `on_progress` gets bytes done
    and bytes in all, each byte counted once for checksumming and once for storing. Raises a ColdStartError; the
    manifest of an earlier version stays until everything else is in place.
    """
    if CHUNK_BYTES % chunk_bytes:
        raise ValueError(f"chunk_bytes must divide {CHUNK_BYTES}, unlike {chunk_bytes}")
    local = FileStore(source)
    repository = layout(local)
    spans = plan_chunks(repository.tensors, chunk_bytes)
    names = [*repository.shards, *repository.documents]
    meter = Meter(2 * sum(local.stat(name).size for name in names), on_progress)
    parts = [[span for span in spans if span.file == number] for number in range(len(names))]
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        digests = list(pool.map(lambda name, part: digest(local, name, part, meter), names, parts))
    previous = published(store)
    entries = [store_file(local, store, previous, item, meter) for item in digests]
    checksums = {span: value for item in digests for span, value in item.checksums.items()}
    files, documents = entries[: len(repository.shards)], entries[len(repository.shards) :]
    manifest = Manifest(
        revision=revision_of(files, documents),
        files=files,
        chunks=[Chunk(*span, checksums[span]) for span in spans],
        tensors=repository.tensors,
        documents={entry.name: entry for entry in documents},
        aliases=repository.aliases,
    )
    if manifest != previous:
        store.write(MANIFEST_KEY, manifest.pack())
    return manifest


class Meter:
    """Adds up progress from several threads."""

    def __init__(self, total: int, report: Progress | None) -> None:
        self._done, self._total, self._report = 0, total, report
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._report:
                self._report(self._done, self._total)


def digest(local: FileStore, name: str, spans: Sequence[Span], meter: Meter) -> Digest:
    """One pass over the file; every span must lie within one block of the 16 MiB grid."""
    found = local.stat(name)
    whole = hashlib.sha256()
    checksums: dict[Span, int] = {}
    buffer = memoryview(bytearray(min(CHUNK_BYTES, found.size)))
    waiting = deque(sorted(spans, key=lambda span: span.offset))
    for start in range(0, found.size, CHUNK_BYTES):
        block = buffer[: min(CHUNK_BYTES, found.size - start)]
        local.read_range(name, start, block, found.etag)
        whole.update(block)
        while waiting and waiting[0].offset < start + len(block):
            span = waiting.popleft()
            checksums[span] = xxhash.xxh3_64_intdigest(block[span.offset - start :][: span.length])
        meter.add(len(block))
    return Digest(found, whole.hexdigest(), checksums)


def published(store: ObjectStore) -> Manifest | None:
    try:
        return read_manifest(store)
    except (ObjectMissing, ManifestInvalid):
        return None


def store_file(
    local: FileStore, store: ObjectStore, previous: Manifest | None, item: Digest, meter: Meter
) -> FileEntry:
    name, size, version = item.found
    old = [entry for entry in previous_entries(previous) if entry.name == name]
    if not (old and is_stored(store, old[0]) and old[0].size == size and old[0].digest == item.sha256):
        stored = store.write(name, local.folder / name)
        if stored.size != size or local.stat(name).etag != version:
            raise ObjectChanged(f"{local.url}/{name}", None, "the file changed while it was being published")
        old = [FileEntry(name, size, stored.etag, item.sha256)]
    meter.add(size)
    return old[0]


def previous_entries(previous: Manifest | None) -> list[FileEntry]:
    return [*previous.files, *previous.documents.values()] if previous else []


def is_stored(store: ObjectStore, entry: FileEntry) -> bool:
    try:
        return store.stat(entry.name) == ObjectInfo(entry.name, entry.size, entry.etag)
    except ObjectMissing:
        return False
