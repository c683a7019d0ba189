"""Weights that lie in files of this machine: copied to the device straight from the page cache, and checked meanwhile.

One thread registers windows of the files with CUDA and queues their copies, in load order. Registering brings the
pages into the process's page table; to do that beforehand, even with many threads, made it no faster on an H200's host,
and held up the CUDA driver, which maps memory too while it starts.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from stoker.coldstart.failures import FetchCancelled, ObjectAltered
from stoker.coldstart.manifest import Manifest
from stoker.coldstart.mapped_file import MappedFile
from stoker.coldstart.pinned import Registration
from stoker.coldstart.sources import is_right
from stoker.coldstart.timeline import Record

WINDOW_BYTES = 256 << 20
PAUSE_S = 0.002
"""Between windows that are given back, about as long as each of them takes: others need the driver's lock too."""
THREADS = 16

Place = Callable[[int, memoryview, bool], None]
"""Takes a chunk number, its bytes, and whether they are pinned."""


class Window(NamedTuple):
    """Bytes `start` to `stop` of file number `file`, registered with CUDA at once. No chunk crosses its ends."""

    file: int
    start: int
    stop: int


class MappedSource:
    """The files of `manifest` at `paths`, in its order. Raises a ColdStartError for one that is missing or of another
    size.

    `deliver` hands over every chunk; `check` begins with checksums in threads of its own, and `verify` waits for them.
    `close` when no copy is under way.
    """

    def __init__(self, manifest: Manifest, paths: Sequence[Path]) -> None:
        self._manifest = manifest
        self._windows = by_window(manifest)
        self._files: list[MappedFile] = []
        self._pins: list[Registration] = []
        self._stop = threading.Event()
        self._failure: ObjectAltered | None = None
        self._checks: list[Future[None]] = []
        self._began_ns = self._check_began_ns = self._checked_ns = self._register_ns = 0
        try:
            for entry, path in zip(manifest.files, paths, strict=True):
                self._files.append(MappedFile(path, entry.size))
        except BaseException:
            self.close()
            raise

    def check(self, chunks: Iterable[int]) -> None:
        self._check_began_ns = time.monotonic_ns()
        pool = ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="checksums")
        self._checks += [pool.submit(self._check, chunk) for chunk in chunks]
        pool.shutdown(wait=False)

    def deliver(self, place: Place) -> None:
        """Raises the error of a chunk that was found to be wrong, or FetchCancelled after `cancel`."""
        self._began_ns = time.monotonic_ns()
        for window, chunks in self._windows.items():
            began = time.monotonic_ns()
            address, length = self._files[window.file].address + window.start, window.stop - window.start
            pin = Registration(address, length, read_only=True)
            self._pins.append(pin)
            self._register_ns += time.monotonic_ns() - began
            for chunk in chunks:
                place(chunk, self._view(chunk), pin.active)
            self._go_on()

    def verify(self) -> None:
        """Raises the error of a chunk that isn't the published one."""
        for check in self._checks:
            check.result()
        self._go_on()
        self._checked_ns = time.monotonic_ns()

    def name(self, file: int) -> str:
        return self._files[file].name

    def phases(self) -> list[Record]:
        """Timeline records: the time that went into registering, and how long checksums took, if there were any."""
        registered = {"start_ns": self._began_ns, "end_ns": self._began_ns + self._register_ns}
        found = [{"name": "register files", **registered, "bytes": sum(file.size for file in self._files)}]
        if self._checks:
            checked = {"start_ns": self._check_began_ns, "end_ns": self._checked_ns, "chunks": len(self._checks)}
            found.append({"name": "checksum", **checked})
        return found

    def cancel(self) -> None:
        self._stop.set()

    def close(self) -> None:
        """Ends the threads and unmaps the files."""
        self._stop.set()
        for task in self._checks:
            task.cancel()
        for task in self._checks:
            if not task.cancelled():
                task.exception()
        for pin in self._pins:
            if pin.active:
                pin.release()
                time.sleep(PAUSE_S)
        for file in self._files:
            file.close()

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise self._failure or FetchCancelled(self._files[0].name, None, "the load was cancelled")

    def _check(self, number: int) -> None:
        chunk = self._manifest.chunks[number]
        if not self._stop.is_set() and not is_right(chunk, self._view(number)):
            span = (chunk.offset, chunk.offset + chunk.length)
            reason = f"its checksum isn't the published {chunk.checksum:016x}"
            self._failure = ObjectAltered(self._files[chunk.file].name, span, reason)
            self._stop.set()

    def _view(self, number: int) -> memoryview:
        chunk = self._manifest.chunks[number]
        return self._files[chunk.file].view(chunk.offset, chunk.length)


def by_window(manifest: Manifest, window_bytes: int = WINDOW_BYTES) -> dict[Window, list[int]]:
    """The chunks of each window, windows in the order in which the first of their chunks is wanted."""
    crossing = any(c.offset // window_bytes != (c.offset + c.length - 1) // window_bytes for c in manifest.chunks)
    # Chunks are cut on a finer grid, unless a foreign tool cut them: then a file is one window.
    size = max((entry.size for entry in manifest.files), default=1) if crossing else window_bytes
    windows: dict[Window, list[int]] = {}
    for number, chunk in enumerate(manifest.chunks):
        start = chunk.offset // size * size
        window = Window(chunk.file, start, min(start + size, manifest.files[chunk.file].size))
        windows.setdefault(window, []).append(number)
    return windows
