"""What one replica has to say, on its way to the function's log: rate-limited, batched, never waited for."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain

from redis.exceptions import RedisError

from stoker.runtime.logs.line import Line, Stream, readable
from stoker.runtime.logs.log_book import LogBook

# A line costs 1 and 1 more for each COST_BYTES of it.
PER_S, BURST, COST_BYTES = 200.0, 2_000.0, 256
FLUSH_S = 0.05
AWAY_S = 0.5
LAST_WORDS_S = 2.0
# Beside what the host itself says, which is little.
MOST_WAITING = 2_000
# Of the lines that there was no room for, so many are kept: the last ones say how it ended.
MOST_LAST = 100

Said = tuple[Stream, str, str]
"""A line's stream, text and job."""


class Allowance:
    """A token bucket. `now` is monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._left = BURST
        self._at = now
        self._empty = False

    def lines(self, now: float) -> int:
        """How many short ones there is room for; once there was none, none until a second's worth has come in."""
        self._left = min(BURST, self._left + (now - self._at) * PER_S)
        self._at = now
        self._empty = self._left < (PER_S if self._empty else 1)
        return 0 if self._empty else int(self._left)

    def take(self, text: str) -> None:
        self._left -= 1 + len(text) // COST_BYTES


class ReplicaLog:
    """Lines beyond the allowance, or while Redis is away for long, are dropped, and the log says how many; the last of
    them follow, on credit."""

    def __init__(self, book: LogBook, function: str, replica: str) -> None:
        self._book = book
        self._function = function
        self._replica = replica
        self._allowance = Allowance(time.monotonic())
        self._waiting: list[Line] = []
        self._dropped = 0
        self._last: deque[Callable[[], Iterable[Said]]] = deque(maxlen=MOST_LAST)
        self._filled = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    def room(self) -> int:
        """How many lines `write` would take now."""
        return min(self._allowance.lines(time.monotonic()), MOST_WAITING - len(self._waiting))

    def say(self, text: str) -> None:
        """Something about the replica's life."""
        self._put(Line(self._replica, "stoker", text))

    def write(self, stream: Stream, text: str, job: str) -> None:
        if self.room() <= 0:
            self.drop(1, [lambda: [(stream, text, job)]])
            return
        self._allowance.take(text)
        self._put(Line(self._replica, stream, text, job))

    def traceback(self, text: str) -> None:
        for line in text.splitlines():
            self.write("stderr", readable(line.encode()), job="")

    def drop(self, lines: int, last: Iterable[Callable[[], Iterable[Said]]]) -> None:
        """`last`: the last of them, which are read only if they stay so."""
        self._dropped += lines
        self._last.extend(last)
        self._mark()

    async def close(self) -> None:
        """What waits is written, unless Redis doesn't take it soon."""
        self._own_up()
        self._closing = True
        self._filled.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=LAST_WORDS_S)
            self._task.cancel()

    def _put(self, line: Line) -> None:
        self._own_up()
        self._waiting.append(line)
        self._mark()

    def _own_up(self) -> None:
        """Where lines are missing, the log says so."""
        if left_out := self._dropped - len(self._last):
            self._waiting.append(Line(self._replica, "stoker", dropped_text(left_out)))
        for stream, text, job in chain.from_iterable(said() for said in self._last):
            self._allowance.take(text)
            self._waiting.append(Line(self._replica, stream, text, job))
        self._dropped = 0
        self._last.clear()

    def _mark(self) -> None:
        self._filled.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while self._waiting or not self._closing:
            await self._filled.wait()
            await asyncio.sleep(0 if self._closing else FLUSH_S)
            try:
                await self._flush()
            except RedisError:
                await asyncio.sleep(AWAY_S)

    async def _flush(self) -> None:
        self._filled.clear()
        if self.room() > 0:
            self._own_up()
        taken = list(self._waiting)
        try:
            if taken:
                await self._book.append(self._function, taken)
        except BaseException:
            self._filled.set()
            raise
        del self._waiting[: len(taken)]
        if self._dropped:
            self._filled.set()


def dropped_text(lines: int) -> str:
    return f"left out {lines} line{'s' * (lines > 1)}: a replica may write about {PER_S:g} a second"
