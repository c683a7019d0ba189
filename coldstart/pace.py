"""How many connections are worth having, and which read is slow enough for a second one: decisions without I/O."""

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

# Connections: slow start while goodput grows, then additive increase and multiplicative decrease (Chiu and Jain 1989).
GROWTH = 1.1
CALM_WINDOWS = 8

# Hedging ("The Tail at Scale", Dean and Barroso 2013): a second request for what takes much longer than is usual.
HEDGE_AFTER_S = 0.5
PATIENCE = 2.0
ENOUGH = 3
UNKNOWN_RATE = 8e6
EXTRA_SHARE = 0.05
EXTRA_CHUNKS = 4


class Window(NamedTuple):
    """`limit` connections; `goodput` in bytes/s is what the last growth must beat; `calm` counts windows in which
    nothing changed. `pushed` once the store has refused: from then on growth is by one."""

    limit: int
    goodput: float = 0.0
    calm: int = 0
    pushed: bool = False


def adjust(window: Window, goodput: float, refused: bool, ceiling: int) -> Window:
    """The next window after one in which `goodput` was measured; never below 1 nor above `ceiling`."""
    if refused:
        return Window(max(1, window.limit // 2), goodput, 0, True)
    if window.pushed:
        grows = window.calm + 1 >= CALM_WINDOWS
        return Window(min(ceiling, window.limit + grows), goodput, 0 if grows else window.calm + 1, True)
    if goodput > GROWTH * window.goodput:
        return Window(min(ceiling, 2 * window.limit), goodput, 0)
    return window._replace(calm=window.calm + 1)


class Progress(NamedTuple):
    """A running read of `length` bytes after `age_s`; `refused` when the store asked it to slow down."""

    chunk: int
    age_s: float
    received: int
    length: int
    refused: bool = False

    @property
    def rate(self) -> float:
        return self.received / self.age_s if self.age_s > 0 else 0.0

    @property
    def left_s(self) -> float:
        return (self.length - self.received) / self.rate if self.rate else math.inf


def typical_rate(finished: Sequence[float], running: Sequence[Progress]) -> float:
    """Bytes/s that one read can be expected to reach: the median of those that ended, or of the running ones too while
    those are few."""
    known = list(finished)
    if len(known) < ENOUGH:
        known += [read.rate for read in running if read.age_s >= HEDGE_AFTER_S]
    return max(median(known) if len(known) >= ENOUGH else UNKNOWN_RATE, 1.0)


def is_slow(read: Progress, typical: float) -> bool:
    """It took and will take so long that a second request, made now, would be done much earlier."""
    expected_s = max(HEDGE_AFTER_S, PATIENCE * read.length / typical)
    return not read.refused and read.age_s >= expected_s and read.left_s >= expected_s


def slowest(running: Sequence[Progress], typical: float) -> Progress | None:
    return max((read for read in running if is_slow(read, typical)), key=lambda read: read.left_s, default=None)


def may_hedge(extra_bytes: int, length: int, total_bytes: int) -> bool:
    """Bounds what hedging may cost: `extra_bytes` have been received twice, or may be by the hedges that run."""
    return extra_bytes + length <= max(EXTRA_CHUNKS * length, int(EXTRA_SHARE * total_bytes))
