"""This host's copies of published adapters: files in a folder, bounded, those unused for longest go first.

A copy is one store's: what another address claims to be the same is fetched from there. Of a local folder there are no
copies: its files are as near.
"""

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from stoker.coldstart.failures import ObjectAltered, StoreUnavailable
from stoker.coldstart.file_store import FileStore
from stoker.coldstart.manifest import CHUNK_BYTES, FileEntry
from stoker.coldstart.store import ObjectStore
from stoker.runtime.adapters.published import read_adapter

PARTIAL = ".part"
CONNECTIONS = 8
IN_USE_S = 60.0
"""Whoever asked for a copy has opened it by then."""


class AdapterShelf:
    """Thread-safe. Up to about `max_bytes` are kept."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._checked: set[Path] = set()

    def fetch(self, url: str) -> dict[str, Any]:
        """The fields of an AdapterFile; blocks. Raises ColdStartError, or ValueError for what is no store's URL."""
        store, manifest, config = read_adapter(url)
        [entry] = manifest.files
        path = store.locate(entry.name) if isinstance(store, FileStore) else self._copy(store, entry)
        fields = {"revision": manifest.revision, "path": str(path), "digest": entry.digest}
        return {**fields, "rank": config.rank, "scale": config.scale}

    def keeps(self, path: Path) -> bool:
        """Whether a file is still there; if so, it was used now."""
        with suppress(OSError):
            if path.parent == self._folder:
                os.utime(path)
            return path.exists()
        return False

    def discard(self, path: Path) -> bool:
        """What is no good; False: it is no copy."""
        if path.parent != self._folder:
            return False
        path.unlink(missing_ok=True)
        return True

    def _copy(self, store: ObjectStore, entry: FileEntry) -> Path:
        path = self._folder / hashlib.sha256(f"{store.url}\n{entry.digest}".encode()).hexdigest()
        try:
            if not self.keeps(path) or not (path in self._checked or digest_of(path) == entry.digest):
                self._folder.mkdir(parents=True, exist_ok=True)
                download(store, entry, path)
            self._checked.add(path)
            self._make_room()
        except OSError as error:
            raise StoreUnavailable(f"{store.url}/{entry.name}", None, f"this host can't keep it: {error}") from error
        return path

    def _make_room(self) -> None:
        files = sorted(self._files(), key=lambda file: file[1])
        excess = sum(size for _, _, size in files) - self._max_bytes
        for path, used_at, size in files:
            if excess > 0 and time.time() - used_at > IN_USE_S:
                path.unlink(missing_ok=True)
                excess -= size

    def _files(self) -> Iterator[tuple[Path, float, int]]:
        """Each with the time of its last use, and its size."""
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):
                found = path.stat()
                yield path, found.st_mtime, found.st_size


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(store: ObjectStore, entry: FileEntry, path: Path) -> None:
    """Several parts at once; the file is there when all of it is, and right."""
    fd, temporary = tempfile.mkstemp(dir=path.parent, suffix=PARTIAL)

    def fetch(offset: int) -> None:
        part = memoryview(bytearray(min(CHUNK_BYTES, entry.size - offset)))
        store.read_range(entry.name, offset, part, entry.etag)
        if os.pwrite(fd, part, offset) != len(part):
            raise OSError("the disk is full")

    try:
        with open(fd, "rb+"), ThreadPoolExecutor(CONNECTIONS) as pool:
            list(pool.map(fetch, range(0, entry.size, CHUNK_BYTES)))
        if digest_of(Path(temporary)) != entry.digest:
            raise ObjectAltered(f"{store.url}/{entry.name}", None, "its SHA-256 is not the published one")
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
