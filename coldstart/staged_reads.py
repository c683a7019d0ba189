"""Chunks of local files that are read into pinned memory, beside others that are copied from where they are mapped.

To register mapped files with CUDA is slower than the wires to the device are; to read them costs processors instead of
the driver's lock. Who registers takes whole windows from the front of the load, in order, and readers take chunks from
its end: they meet where their speeds let them, and nobody has to know these beforehand.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import torch

from stoker.coldstart.failures import ObjectTruncated, StoreUnavailable
from stoker.coldstart.manifest import Chunk
from stoker.coldstart.pinned import PinnedMemory
from stoker.coldstart.upload import mark

SLOT_BYTES = 16 << 20
SLOTS = 2
"""Of each reader: one is filled while the other one is copied."""

Place = Callable[[int, memoryview, bool], None]
"""Takes a chunk number, its bytes, and whether they are pinned."""
Slot = tuple[memoryview, torch.cuda.Event | None]
"""Memory, and the end of the copies from it."""


class Window(NamedTuple):
    """Bytes `start` to `stop` of file number `file`, registered with CUDA at once. No chunk crosses its ends."""

    file: int
    start: int
    stop: int


class BothEnds:
    """Windows and their chunks, to be taken from both ends by any thread. Every chunk is given out once."""

    def __init__(self, windows: Iterable[tuple[Window, Sequence[int]]]) -> None:
        self._left = deque((window, list(chunks)) for window, chunks in windows)
        self._lock = threading.Lock()

    def first(self) -> tuple[Window, list[int]] | None:
        """A window, and those of its chunks that nobody has taken."""
        with self._lock:
            return self._left.popleft() if self._left else None

    def last(self) -> int | None:
        """A chunk."""
        with self._lock:
            if not self._left:
                return None
            _, chunks = self._left[-1]
            if len(chunks) == 1:
                self._left.pop()
            return chunks.pop()


class Reader:
    """Reads chunks (of SLOT_BYTES at most) from the end of `work` for as long as there are any, in the calling thread.
    `place` is called by one thread at a time if it sees to that itself."""

    def __init__(self, chunks: Sequence[Chunk], paths: Sequence[Path], place: Place, device: torch.device) -> None:
        self._chunks, self._paths = chunks, paths
        self._place, self._device = place, device
        self._files: dict[int, int] = {}
        self.bytes = 0

    def run(self, work: BothEnds, stop: threading.Event) -> None:
        """Raises ObjectTruncated or StoreUnavailable. The copies it has asked for have ended when it returns."""
        try:
            with closing(PinnedMemory(SLOTS * SLOT_BYTES)) as memory:
                self._run(memory, work, stop)
        finally:
            for file in self._files.values():
                os.close(file)

    def _run(self, memory: PinnedMemory, work: BothEnds, stop: threading.Event) -> None:
        starts = range(0, SLOTS * SLOT_BYTES, SLOT_BYTES)
        slots: deque[Slot] = deque((memory.view[start : start + SLOT_BYTES], None) for start in starts)
        try:
            while not stop.is_set() and (number := work.last()) is not None:
                slot, copied = slots.popleft()
                if copied:
                    copied.synchronize()
                chunk = self._chunks[number]
                self._read(chunk, slot[: chunk.length])
                self._place(number, slot, memory.pinned)
                slots.append((slot, mark(self._device)))
        finally:
            for _, copied in slots:
                if copied:
                    copied.synchronize()

    def _read(self, chunk: Chunk, target: memoryview) -> None:
        path, done = self._paths[chunk.file], 0
        try:
            if chunk.file not in self._files:
                self._files[chunk.file] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            while done < chunk.length:
                if not (count := os.preadv(self._files[chunk.file], [target[done:]], chunk.offset + done)):
                    span = (chunk.offset, chunk.offset + chunk.length)
                    raise ObjectTruncated(path.absolute().as_uri(), span, "the file has become shorter")
                done += count
        except OSError as error:
            raise StoreUnavailable(path.absolute().as_uri(), None, f"can't read: {error}") from error
        self.bytes += chunk.length
