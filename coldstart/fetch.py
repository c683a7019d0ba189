"""Fetches a model's chunks from the nearest sources into ring slots, each verified before it is handed out (unless
their receiver does that)."""

import threading
import time
from collections import deque
from typing import Any

from stoker.coldstart.chunk_cache import BUSY, ChunkCache, Claim
from stoker.coldstart.failures import ColdStartError, FetchCancelled, StoreUnavailable
from stoker.coldstart.fetch_board import Board, Read, Ready
from stoker.coldstart.manifest import Manifest
from stoker.coldstart.pace import Window, adjust
from stoker.coldstart.ring import Ring
from stoker.coldstart.sources import CACHE, PEER, STORE, Peers, StoreSource, Tallies
from stoker.coldstart.store import ObjectStore

MAX_CONNECTIONS = 192
WINDOW_S = 0.25
TICK_S = 0.1
# A chunk that another agent of this host is fetching: how soon it is looked at again, and how long it is left to it.
DEFER_S = 0.02
LEAVE_IT_S = 5.0


class Fetcher:
    """Threads take chunks in load order, each as soon as a slot is free; `next` and `release` belong to the consumer.
    The ring is this fetcher's alone until all slots are released or `cancel` has returned.

    It starts with `connections` reads at once and adapts that number. A read that is much slower than the others gets
    a second one on another connection and into another slot; the first complete one is handed out.
    """

    def __init__(
        self,
        store: ObjectStore,
        manifest: Manifest,
        ring: Ring,
        *,
        connections: int = 8,
        cache: ChunkCache | None = None,
        peers: Peers | None = None,
        verify: bool = True,
    ) -> None:
        largest = max((chunk.length for chunk in manifest.chunks), default=0)
        if largest > ring.slot_bytes:
            raise ValueError(f"a chunk of {largest} bytes doesn't fit a ring slot of {ring.slot_bytes}")
        self._url, self._chunks, self._ring = store.url, manifest.chunks, ring
        self._checked = checked(manifest, verify)
        self._verify = verify
        self._source, self._cache, self._peers = StoreSource(store, manifest), cache, peers
        self._changed = threading.Condition()
        self._board = Board([chunk.length for chunk in manifest.chunks], ring.slots)
        self._ready: deque[Ready] = deque()
        self._handed_out = 0
        self._failure: ColdStartError | None = None
        self._ceiling = max(1, min(MAX_CONNECTIONS, ring.slots, len(manifest.chunks)))
        self._window = Window(max(1, min(connections, self._ceiling)))
        self._most = self._window.limit
        self._measured_at, self._measured_bytes, self._refusals_seen = 0.0, 0.0, 0.0
        self._claims: dict[int, Claim] = {}
        self._left_since: dict[int, float] = {}
        self._ended: dict[str, float] = {"retries": 0, "refusals": 0, "received": 0, "checked_s": 0.0}
        self._threads: list[threading.Thread] = []
        self._tallies = Tallies()
        self._started = self._finished = self._awaited_s = 0.0
        self.fetched_bytes = 0
        self.total_bytes = manifest.total_bytes

    def start(self) -> None:
        if self._cache:
            self._cache.keep(self._chunks)
        with self._changed:
            self._started = self._measured_at = time.monotonic()
            self._match_threads()

    def next(self, timeout: float | None = None) -> Ready | None:
        """The next chunk, or None when all have been handed out. Raises the fetch's error, or TimeoutError."""
        began = time.monotonic()
        with self._changed:
            if not self._changed.wait_for(self._has_answer, timeout):
                raise TimeoutError(f"no chunk within {timeout} s")
            self._awaited_s += time.monotonic() - began
            if self._failure:
                raise self._failure
            if not self._ready:
                return None
            self._handed_out += 1
            return self._ready.popleft()

    def release(self, slot: int) -> None:
        with self._changed:
            self._board.release(slot)
            self._changed.notify_all()

    def cancel(self) -> None:
        """Returns when no thread touches the ring any more; `next` raises FetchCancelled from then on."""
        self._fail(FetchCancelled(self._url, None, "the fetch was cancelled"))
        for thread in self._threads:
            thread.join()

    def summary(self) -> dict[str, Any]:
        """`seconds` run until the last chunk was verified; `connections` is the most at once; `retries` counts repeated
        ranged reads, `extra_bytes` what was received twice, `checksum_s` the time of all threads in checksums.
        `slot_wait_s`: chunks waited for the consumer; `chunk_wait_s`: the consumer waited for chunks."""
        with self._changed:
            return {
                "bytes": self.fetched_bytes,
                "seconds": (self._finished or time.monotonic()) - self._started,
                "connections": self._most,
                "retries": self._count("retries"),
                "refusals": self._count("refusals"),
                "checksum_s": round(self._count("checked_s"), 3),
                "hedges": self._board.hedges,
                "extra_bytes": self._board.extra_bytes,
                "slot_wait_s": round(self._board.starved_s, 3),
                "chunk_wait_s": round(self._awaited_s, 3),
                "sources": self._tallies.report(),
                "checked": self._checked,
            }

    @property
    def all_asked_for(self) -> bool:
        """No chunk waits for its turn: the wires will be free."""
        with self._changed:
            return not self._board.has_waiting

    def _has_answer(self) -> bool:
        return bool(self._failure or self._ready or self._handed_out == len(self._chunks))

    def _work(self) -> None:
        try:
            while (read := self._take()) is not None:
                try:
                    self._attempt(read)
                except ColdStartError as error:
                    self._give_up(read, error)
        except Exception as error:
            self._fail(StoreUnavailable(self._url, None, f"unexpected {type(error).__name__}: {error}"))

    def _take(self) -> Read | None:
        with self._changed:
            while not self._failure and not self._board.complete:
                now = time.monotonic()
                self._adapt(now)
                if read := self._board.take(now, self._window.limit):
                    return read
                self._changed.wait(TICK_S)
            return None

    def _attempt(self, read: Read) -> None:
        chunk, into = self._chunks[read.chunk], self._ring.slot(read.slot)[: read.length]
        read.watch.verify = self._verify
        with self._tallies.timing(read.length) as found:
            source = self._read(read, into)
            if source is None:
                return
            with self._changed:
                claim = self._claims.pop(read.chunk, None)
                if not self._win(read, source, 2 if claim else 1):
                    return
            found.append(source)
        if claim:
            claim.commit(into, chunk)
            self.release(read.slot)

    def _read(self, read: Read, into: memoryview) -> str | None:
        """Which source filled `into` with verified bytes; None when the chunk has been left to somebody else."""
        chunk = self._chunks[read.chunk]
        if self._cache and chunk.checksum is not None and not read.hedge:
            if self._cache.read(chunk, into, read.watch):
                return CACHE
            if not self._claim(read):
                return None
        if self._peers and chunk.checksum is not None and not read.hedge and self._peers.read(chunk, into, read.watch):
            return PEER
        read.watch.received = 0
        self._source.read(chunk, into, read.watch)
        return STORE

    def _claim(self, read: Read) -> bool:
        """False when another agent of this host is fetching the chunk, and may for a while."""
        assert self._cache is not None
        claim = self._cache.claim(self._chunks[read.chunk])
        with self._changed:
            if claim is not BUSY:
                self._claims[read.chunk] = claim
                if self._failure:
                    self._drop_claims()
                return True
            now = time.monotonic()
            if now - self._left_since.setdefault(read.chunk, now) > LEAVE_IT_S:
                return True
            self._board.defer(read, now + DEFER_S)
            self._changed.notify_all()
            return False

    def _win(self, read: Read, source: str, holders: int) -> bool:
        self._count_ended(read)
        won = self._board.win(read, time.monotonic(), holders, source != CACHE)
        if won:
            self._ready.append(Ready(read.chunk, read.slot))
            self.fetched_bytes += read.length
            if self._board.complete:
                self._finished = time.monotonic()
        self._changed.notify_all()
        return won

    def _give_up(self, read: Read, error: ColdStartError) -> None:
        """An error is final unless a rival of this read has brought the chunk or may still do so."""
        with self._changed:
            rival = self._board.has_rival(read)
            self._count_ended(read)
            self._board.lose(read)
            self._changed.notify_all()
        if not rival:
            self._fail(error)

    def _fail(self, error: ColdStartError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._finished = self._finished or time.monotonic()
            for read in self._board.reads:
                read.watch.stop.set()
            self._drop_claims()
            self._changed.notify_all()

    def _drop_claims(self) -> None:
        while self._claims:
            self._claims.popitem()[1].abandon()

    def _adapt(self, now: float) -> None:
        """Once per window: measures it, and sets how many reads there may be in the next one."""
        if now - self._measured_at < WINDOW_S:
            return
        received, refusals = self._count("received"), self._count("refusals")
        goodput = (received - self._measured_bytes) / (now - self._measured_at)
        self._window = adjust(self._window, goodput, refusals > self._refusals_seen, self._ceiling)
        self._measured_at, self._measured_bytes, self._refusals_seen = now, received, refusals
        self._most = max(self._most, self._window.limit)
        self._match_threads()

    def _match_threads(self) -> None:
        """One thread per read that there may be, and a spare one for hedges and for looking after the others."""
        wanted = self._window.limit + (self._ring.slots > 1)
        for number in range(len(self._threads), wanted if self._chunks else 0):
            thread = threading.Thread(target=self._work, name=f"stoker-fetch-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _count(self, name: str) -> float:
        return self._ended[name] + sum(getattr(read.watch, name) for read in self._board.reads)

    def _count_ended(self, read: Read) -> None:
        for name in self._ended:
            self._ended[name] += getattr(read.watch, name)


def checked(manifest: Manifest, verify: bool) -> str:
    if not manifest.published:
        return "length and version"
    return "checksum of every chunk" if verify else "length and version; checksums by the receiver"
