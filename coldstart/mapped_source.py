"""Weights that lie in files of this machine: copied to the device straight from the page cache, and checked meanwhile.

Three things run at once, each in load order: threads bring windows of the files into this process's page table, one
thread registers them with CUDA and queues their copies, and threads compute the checksums of the chunks.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
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
THREADS = 16
LEAD = 8
"""Windows whose pages are brought in before the first one is checked: registering them must not wait for checksums."""

Place = Callable[[int, memoryview], None]


class Window(NamedTuple):
    """Bytes `start` to `stop` of file number `file`, registered with CUDA at once. No chunk crosses its ends."""

    file: int
    start: int
    stop: int


class MappedSource:
    """The files of `manifest` at `paths`, in its order. Raises a ColdStartError for one that is missing or of another
    size.

    `start` begins to check and to fill page tables, `deliver` hands over every chunk, `verify` waits for the checksums.
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
        self._ready: dict[Window, Future[None]] = {}
        self._began_ns = self._checked_ns = self._register_ns = 0
        try:
            for entry, path in zip(manifest.files, paths, strict=True):
                self._files.append(MappedFile(path, entry.size))
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        threads = min(THREADS, len(os.sched_getaffinity(0)))
        pool = ThreadPoolExecutor(threads, thread_name_prefix="weights")
        self._began_ns = time.monotonic_ns()
        ahead = deque(self._windows)
        for number, chunks in enumerate(self._windows.values()):
            while ahead and len(self._ready) <= number + LEAD:
                window = ahead.popleft()
                self._ready[window] = pool.submit(self._populate, window)
            self._checks += [pool.submit(self._check, chunk) for chunk in chunks]
        pool.shutdown(wait=False)

    def deliver(self, place: Place) -> None:
        """Raises the error of a chunk that was found to be wrong, or FetchCancelled after `cancel`."""
        for window, chunks in self._windows.items():
            self._ready[window].result()
            began = time.monotonic_ns()
            address, length = self._files[window.file].address + window.start, window.stop - window.start
            self._pins.append(Registration(address, length, read_only=True))
            self._register_ns += time.monotonic_ns() - began
            for chunk in chunks:
                place(chunk, self._view(chunk))
            self._go_on()

    def verify(self) -> None:
        """Raises the error of a chunk that isn't the published one."""
        for check in self._checks:
            check.result()
        self._go_on()
        self._checked_ns = time.monotonic_ns()

    def phases(self) -> list[Record]:
        """Timeline records: the checksums' whole length, and the time that went into registering."""
        facts = {"bytes": self._manifest.total_bytes}
        return [
            {"name": "checksum", "start_ns": self._began_ns, "end_ns": self._checked_ns, **facts},
            {
                "name": "register files",
                "start_ns": self._began_ns,
                "end_ns": self._began_ns + self._register_ns,
                **facts,
            },
        ]

    def cancel(self) -> None:
        self._stop.set()

    def close(self) -> None:
        """Ends the threads and unmaps the files."""
        self._stop.set()
        for task in [*self._ready.values(), *self._checks]:
            task.cancel()
        for task in [*self._ready.values(), *self._checks]:
            if not task.cancelled():
                task.exception()
        for pin in self._pins:
            pin.release()
        for file in self._files:
            file.close()

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise self._failure or FetchCancelled(self._files[0].name, None, "the load was cancelled")

    def _populate(self, window: Window) -> None:
        if not self._stop.is_set():
            self._files[window.file].populate(window.start, window.stop - window.start)

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
