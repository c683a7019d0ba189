"""A cache of verified chunks in a folder of this host, addressed by content, bounded, least recently used goes first.

Two agents may share the folder. A chunk is written under a temporary name by whoever holds that file's lock, and
renamed when complete; what a crash or the disk did to it is found by its checksum when it is read. Nothing is synced:
a chunk that is lost is fetched again. A chunk is shared only within its domain (a bucket), because XXH3 can be forged:
whoever may write there may replace the weights anyway.
"""

import fcntl
import hashlib
import logging
import math
import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple
from urllib.parse import urlsplit

from stoker.coldstart.manifest import Chunk
from stoker.coldstart.sources import is_right
from stoker.coldstart.store import ReadWatch

PARTIAL = ".part"
BROKEN_FOR_S = 60.0
SCAN_S = 1.0
CLOCK_S = 0.05

log = logging.getLogger("stoker.coldstart")


class Taken(Enum):
    BUSY = "another process is fetching the chunk"


BUSY = Taken.BUSY


class Entry(NamedTuple):
    path: Path
    size: int
    used_at: float


def domain_of(url: str) -> str:
    """What may share chunks with the store at `url`: everything in its bucket."""
    parts = urlsplit(url)
    return hashlib.blake2b(f"{parts.scheme}://{parts.netloc}".encode(), digest_size=8).hexdigest()


def chunk_name(chunk: Chunk) -> str:
    return f"{chunk.checksum:016x}-{chunk.length}"


class Claim:
    """The right to write one chunk, held by a file lock until `commit` or `abandon`, or until the process ends."""

    def __init__(self, cache: "ChunkCache", fd: int, part: Path, final: Path) -> None:
        self._cache, self._fd, self._part, self._final = cache, fd, part, final

    def commit(self, data: memoryview, chunk: Chunk) -> None:
        """Keeps verified bytes. Never raises for what the disk does."""
        try:
            if self._fd >= 0 and self._cache.make_room(chunk.length):
                self._write(data)
        except OSError as error:
            self._cache.note_failure(error)
        self.abandon()

    def _write(self, data: memoryview) -> None:
        try:
            os.ftruncate(self._fd, 0)
            write_all(self._fd, data)
        except OSError:
            self._cache.settle(len(data), None, self._final)
            with suppress(OSError):
                os.ftruncate(self._fd, 0)
            raise
        self._cache.settle(len(data), self._part, self._final)

    def abandon(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ChunkCache:
    """One load's view of the folder: what it has used or will use is not evicted for what it adds, so that a model
    larger than the cache keeps the part that fits."""

    _outages: ClassVar[dict[Path, float]] = {}

    def __init__(self, folder: Path, max_bytes: int, url: str) -> None:
        self.folder, self.domain, self._max_bytes = folder, domain_of(url), max_bytes
        # File times come from a coarser clock than this one.
        self._opened = time.time() - CLOCK_S
        self._lock = threading.Lock()
        self._used = self._reserved = 0
        self._scanned_at = -math.inf

    def keep(self, chunks: Iterable[Chunk]) -> None:
        """Marks those that are there as just used: this load is going to."""
        for chunk in chunks:
            with suppress(OSError):
                os.utime(self._path(chunk))

    def locate(self, chunk: Chunk) -> Path | None:
        """The file that holds exactly this chunk. Unverified; it may be evicted at any time, but is never rewritten."""
        path = self._path(chunk)
        return path if chunk.checksum is not None and path.is_file() else None

    def read(self, chunk: Chunk, into: memoryview, watch: ReadWatch) -> bool:
        """Fills `into` with the chunk's verified bytes; False when it isn't there (any more) or was damaged."""
        path = self._path(chunk)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            whole = read_all(fd, into, watch) and os.fstat(fd).st_size == len(into)
            if whole and is_right(chunk, into, watch):
                os.utime(fd)
                return True
            log.warning("the cached chunk %s is damaged: it is deleted and fetched again", path)
            path.unlink(missing_ok=True)
        except OSError as error:
            self.note_failure(error)
        finally:
            os.close(fd)
        return False

    def claim(self, chunk: Chunk) -> Claim | Literal[Taken.BUSY]:
        """BUSY while another claim of the chunk is held, in any process. When the folder can't be written to, a claim
        that keeps nothing."""
        final = self._path(chunk)
        part = final.with_name(final.name + PARTIAL)
        if self._out_of_order():
            return Claim(self, -1, part, final)
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            fd = lock_file(part)
        except OSError as error:
            self.note_failure(error)
            return Claim(self, -1, part, final)
        if fd is None or final.exists():
            # It may have been completed between this caller's look and its lock: then it is to be read.
            if fd is not None:
                part.unlink(missing_ok=True)
                os.close(fd)
            return BUSY
        return Claim(self, fd, part, final)

    def make_room(self, length: int) -> bool:
        """Reserves `length` bytes, to be followed by `settle`; evicts what it takes. False when that would take what
        this load uses itself. What other processes write is seen when the folder is looked at again, within a second:
        until then the bound may be exceeded by that much."""
        with self._lock:
            if self._used + length > self._max_bytes or time.monotonic() - self._scanned_at > SCAN_S:
                self._used, self._scanned_at = self._evict(length), time.monotonic()
            if self._used + length > self._max_bytes:
                return False
            self._used += length
            self._reserved += length
            return True

    def settle(self, length: int, part: Path | None, final: Path) -> None:
        """Reserved bytes become a file, in one step with the bookkeeping, or are given back."""
        with self._lock:
            self._reserved -= length
            if part is None:
                self._used -= length
            else:
                os.rename(part, final)

    def _evict(self, length: int) -> int:
        """Bytes in use after evicting what `length` more bytes need, if that is enough."""
        entries = list(scan(self.folder))
        used = sum(entry.size for entry in entries) + self._reserved
        for entry in victims(entries, used + length - self._max_bytes, self._opened) or []:
            entry.path.unlink(missing_ok=True)
            used -= entry.size
        return used

    def note_failure(self, error: OSError) -> None:
        """One warning per outage; nothing is written until it is over."""
        with self._lock:
            if not self._out_of_order():
                log.warning("the weight cache %s can't be used, loading without it: %s", self.folder, error)
            self._outages[self.folder] = time.monotonic() + BROKEN_FOR_S

    def _out_of_order(self) -> bool:
        return time.monotonic() < self._outages.get(self.folder, 0.0)

    def _path(self, chunk: Chunk) -> Path:
        return self.folder / self.domain / (chunk_name(chunk) if chunk.checksum is not None else "unpublished")


def victims(entries: Iterable[Entry], excess: int, keep_from: float) -> list[Entry] | None:
    """The least recently used entries that free `excess` bytes; None when those used before `keep_from` are too few."""
    chosen = []
    for entry in sorted(entries, key=lambda entry: (entry.used_at, entry.path)):
        if excess <= 0:
            break
        if entry.used_at >= keep_from:
            return None
        chosen.append(entry)
        excess -= entry.size
    return chosen if excess <= 0 else None


def scan(folder: Path) -> Iterable[Entry]:
    """Every complete chunk of every domain. What crashed writers left behind is deleted."""
    with suppress(FileNotFoundError):
        for path in folder.glob("*/*"):
            with suppress(FileNotFoundError):
                found = path.stat()
                if path.name.endswith(PARTIAL):
                    delete_unlocked(path)
                else:
                    yield Entry(path, found.st_size, found.st_mtime)


def lock_file(path: Path) -> int | None:
    """A descriptor of the file that `path` names, locked; None when somebody else has the lock."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        # Renamed or deleted between the two calls: the lock is then on a file that nobody will look at.
        with suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                return fd
        os.close(fd)


def delete_unlocked(path: Path) -> None:
    fd = lock_file(path)
    if fd is not None:
        path.unlink(missing_ok=True)
        os.close(fd)


def write_all(fd: int, data: memoryview) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(fd, data[written:], written)


def read_all(fd: int, into: memoryview, watch: ReadWatch) -> bool:
    read = 0
    while read < len(into):
        count = os.preadv(fd, [into[read:]], read)
        if not count:
            return False
        read += count
        watch.received = read
    return True
