"""The object store as the prompt cache's third tier: what a host's replicas leave there when they go to sleep, and find
when they wake. Sealed with a key of the deployment and checked before anything is done with it."""

import mmap
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from stoker.coldstart.failures import ObjectMissing
from stoker.coldstart.store import ObjectStore, ReadWatch
from stoker.runtime.pool.prompt_file import (
    BEGIN_BYTES,
    PromptsUnusable,
    check_seal,
    read_head,
    same,
    seal,
    seconds_worth,
)
from stoker.runtime.stored_prompts import object_key
from stoker.runtime.worker.kernel_store import empty_folder

PART = 8 << 20
CONNECTIONS = 8
HEAD_SHARE = 4
"""Heads take a part of the bytes too: an object may have so many times what its blocks may have."""
TELLING = 1 << 20
"""From so many bytes on, the time of a fetch tells how fast the store is, rather than how far away."""
RECENT = 0.3


class Found(NamedTuple):
    """An object, and for how many seconds waiting for it is worth while."""

    key: str
    size: int
    etag: str
    worth_s: float


@dataclass
class PromptStore:
    """Blocking calls. `most_bytes` of blocks are kept for each function (0: none). `folder` is this agent's alone, for
    files that change hands between it and its engines; `key` seals. `bytes_s` is how fast the store was lately (0: not
    known)."""

    store: ObjectStore
    folder: Path
    key: bytes
    most_bytes: int
    bytes_s: float = 0.0

    def scratch(self) -> Path:
        """A new name; what an agent that died left is deleted."""
        return self._folder / uuid.uuid4().hex

    @cached_property
    def _folder(self) -> Path:
        return empty_folder(self.folder)

    def keep(self, function: str, path: Path) -> int:
        """Seals the file and puts it in the place of what was kept before, which stays valid until then. The file is
        gone afterwards. Raises ColdStartError or OSError."""
        try:
            seal(path, self.key)
            return self.store.write(object_key(function), path).size
        finally:
            path.unlink(missing_ok=True)

    def find(self, function: str) -> Found | None:
        """Raises ColdStartError."""
        begin = bytearray(BEGIN_BYTES)
        try:
            info = self.store.stat(object_key(function))
            self.store.read_range(info.key, 0, memoryview(begin), info.etag)
        except ObjectMissing:
            return None
        return Found(*info, seconds_worth(begin))

    def fetch(self, found: Found, made_for: Mapping[str, Any], path: Path, stop: Event) -> None:
        """Into a new file, which is whole and made for that. Raises ColdStartError, OSError or PromptsUnusable."""
        if not 0 < found.size <= HEAD_SHARE * self.most_bytes:
            raise PromptsUnusable(f"it has {found.size} bytes, where {self.most_bytes} bytes of blocks are kept")
        with open(path, "w+b") as file:
            file.truncate(found.size)
            # Not closed here: what a read has raised may still know parts of it.
            data = memoryview(mmap.mmap(file.fileno(), found.size))
            self._read(found, data, stop)
            check_seal(data, self.key)
        same(read_head(path).made_for, made_for)

    def learn(self, size: int, seconds: float) -> None:
        """From a fetch that ended."""
        if size >= TELLING and seconds > 0:
            rate = size / seconds
            self.bytes_s += RECENT * (rate - self.bytes_s) if self.bytes_s else rate

    def _read(self, found: Found, data: memoryview, stop: Event) -> None:
        """Nothing is written to `data` any more after this."""

        def read(offset: int) -> None:
            try:
                self.store.read_range(found.key, offset, data[offset : offset + PART], found.etag, ReadWatch(stop=stop))
            except BaseException:
                stop.set()
                raise

        began = time.monotonic()
        with ThreadPoolExecutor(CONNECTIONS, "prompts") as threads:
            reads = [threads.submit(read, offset) for offset in range(0, found.size, PART)]
        for done in reads:
            done.result()
        self.learn(found.size, time.monotonic() - began)
