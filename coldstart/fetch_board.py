"""Who reads which chunk into which slot: the bookkeeping of one fetch. Not thread-safe; the fetcher holds a lock."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stoker.coldstart.pace import Progress, may_hedge, slowest, typical_rate
from stoker.coldstart.store import ReadWatch

REMEMBERED_RATES = 64
READS_PER_CHUNK = 2
LOOK_S = 0.05


class Ready(NamedTuple):
    """Chunk number `chunk` of the manifest is complete and verified at the start of ring slot `slot`."""

    chunk: int
    slot: int


@dataclass(eq=False, slots=True)
class Read:
    """One thread's attempt at a chunk; a hedge is a second one. Times are time.monotonic()."""

    chunk: int
    slot: int
    length: int
    started: float
    hedge: bool
    watch: ReadWatch = field(default_factory=ReadWatch)

    def progress(self, now: float) -> Progress:
        received = min(self.watch.received, self.length)
        return Progress(self.chunk, now - self.started, received, self.length, self.watch.refusals > 0)


class Board:
    """Every slot is free, read into, or held: by the consumer, and by the writer of the cache while it copies."""

    def __init__(self, lengths: Sequence[int], slots: int) -> None:
        self._lengths = lengths
        self._total_bytes = sum(lengths)
        self._waiting: deque[tuple[int, float]] = deque((chunk, 0.0) for chunk in range(len(lengths)))
        self._missing = set(range(len(lengths)))
        self._free = deque(range(slots))
        self._holders: dict[int, int] = {}
        self._rates: deque[float] = deque(maxlen=REMEMBERED_RATES)
        self.reads: list[Read] = []
        self.hedges = self.extra_bytes = 0
        self.starved_s = 0.0
        self._starved_since = self._look_at = 0.0

    @property
    def complete(self) -> bool:
        return not self._missing

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def idle(self) -> bool:
        return not self.reads

    def take(self, now: float, limit: int) -> Read | None:
        """The next read, or None when there is nothing to do at the moment. A hedge comes first and counts in no
        limit: its connection replaces one that is as good as lost."""
        chunk = self._slow_chunk(now)
        hedge = chunk is not None
        if chunk is None and sum(not read.hedge for read in self.reads) < limit:
            chunk = self._next_chunk(now)
        self._note_starvation(now)
        if chunk is None or not self._free:
            return None
        if hedge:
            self.hedges += 1
        else:
            self._waiting.remove(next(item for item in self._waiting if item[0] == chunk))
        read = Read(chunk, self._free.popleft(), self._lengths[chunk], now, hedge)
        self.reads.append(read)
        return read

    def defer(self, read: Read, until: float) -> None:
        """Someone else on this host is fetching the chunk: it is looked at again later."""
        self._close(read)
        if not self._waits(read.chunk):
            self._waiting.append((read.chunk, until))

    def win(self, read: Read, now: float, holders: int, remote: bool) -> bool:
        """False when another read was first: the slot is free again. Otherwise the slot is held until it has been
        released `holders` times, and the other reads of the chunk are told to stop. `remote`: it came over a wire."""
        if read.chunk not in self._missing:
            self.lose(read)
            return False
        self.reads.remove(read)
        self._missing.discard(read.chunk)
        # A read that was given up may end well, when its rival has been deferred.
        self._waiting = deque(item for item in self._waiting if item[0] != read.chunk)
        self._holders[read.slot] = holders
        if remote and now > read.started:
            self._rates.append(read.length / (now - read.started))
        for other in self.reads:
            if other.chunk == read.chunk:
                other.watch.stop.set()
        return True

    def lose(self, read: Read) -> None:
        self.extra_bytes += min(read.watch.received, read.length)
        self._close(read)

    def has_rival(self, read: Read) -> bool:
        """Whether the chunk is there, or another read may still bring it."""
        return (
            read.chunk not in self._missing
            or self._waits(read.chunk)
            or any(
                other.chunk == read.chunk and other is not read and not other.watch.stop.is_set()
                for other in self.reads
            )
        )

    def release(self, slot: int) -> None:
        self._holders[slot] -= 1
        if not self._holders[slot]:
            del self._holders[slot]
            self._free.append(slot)

    def _close(self, read: Read) -> None:
        self.reads.remove(read)
        self._free.append(read.slot)

    def _waits(self, chunk: int) -> bool:
        return any(waiting == chunk for waiting, _ in self._waiting)

    def _next_chunk(self, now: float) -> int | None:
        return next((chunk for chunk, not_before in self._waiting if not_before <= now), None)

    def _slow_chunk(self, now: float) -> int | None:
        """The chunk that needs a second request; when it has two already, the older one is given up."""
        if now < self._look_at:
            return None
        self._look_at = now + LOOK_S
        newest = {
            read.chunk: read for read in self.reads if read.chunk in self._missing and not read.watch.stop.is_set()
        }
        progress = [read.progress(now) for read in newest.values()]
        slow = slowest(progress, typical_rate(self._rates, [read.progress(now) for read in self.reads]))
        if slow is None or not self._free or not may_hedge(self._committed(), slow.length, self._total_bytes):
            return None
        rivals = [read for read in self.reads if read.chunk == slow.chunk]
        if len(rivals) < READS_PER_CHUNK:
            return slow.chunk
        rivals[0].watch.stop.set()
        return None

    def _committed(self) -> int:
        """Bytes received twice, and those of hedges that may still be."""
        return self.extra_bytes + sum(read.length for read in self.reads if read.hedge)

    def _note_starvation(self, now: float) -> None:
        """Adds up the time in which chunks waited for a slot: the consumer is slower than the sources then."""
        if self._starved_since:
            self.starved_s += now - self._starved_since
        self._starved_since = now if self._waiting and self._holders and not self._free else 0.0
