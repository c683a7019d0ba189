"""Where a device's time goes. Every nanosecond since the start is counted once: as a step's, or as the time of a swap,
of a load, or of nothing to do."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Literal, NamedTuple

Background = Literal["swap", "load", "idle"]
Part = tuple[str, float, bool]
"""What a request has of a step: its name, its part of the work in any unit, and whether it is prefill."""


class Charge(NamedTuple):
    """Microseconds of a device that one request has had."""

    prefill_us: int = 0
    decode_us: int = 0
    swap_us: int = 0


class Spent(NamedTuple):
    """A step from its launch to its end, and what it computed for requests that still wanted it."""

    parts: list[Part]
    begin_ns: int
    end_ns: int


class Meter:
    """Steps are told of in the order in which they ended; between them the device does what is most urgent of the
    things that are under way: a swap, a load, nothing. A swap that other models' steps hide costs nothing. `swapped` is
    told of the nanoseconds that one has cost."""

    def __init__(
        self,
        clock: Callable[[], int] = time.monotonic_ns,
        swapped: Callable[[int], None] = lambda nanoseconds: None,
    ) -> None:
        self.totals: Counter[str] = Counter()
        self._clock = clock
        self._swapped = swapped
        self.began_ns = self._at = clock()
        self._under_way: Counter[Background] = Counter()

    def begin(self, kind: Background) -> None:
        self.advance()
        self._under_way[kind] += 1

    def end(self, kind: Background) -> None:
        self.advance()
        self._under_way[kind] -= 1

    def step(self, begin_ns: int, end_ns: int) -> int:
        """The nanoseconds that a step had the device. Steps may be queued behind each other: it had this one since the
        end of the one before."""
        self._rest(begin_ns)
        taken = max(0, end_ns - self._at)
        self._at += taken
        self.totals["busy"] += taken
        return taken

    def advance(self) -> None:
        """Books the time until now, in which there was no step."""
        self._rest(self._clock())

    def wall_ns(self) -> int:
        """What is booked."""
        return self._at - self.began_ns

    def _rest(self, until: int) -> None:
        taken = max(0, until - self._at)
        self._at += taken
        kind = next((kind for kind in ("swap", "load") if self._under_way[kind]), "idle")
        self.totals[kind] += taken
        if kind == "swap" and taken:
            self._swapped(taken)
