"""Whose turn it is on a device that can't hold all of its models at once: which comes in, where, and for whom. Pure.

Models without weights on the device wait; those that have them run. One swap is planned at a time. A model that runs is
sent away only when it is idle, or has had a quantum that is long beside the swap, so that swaps take at most a tenth of
the time; of those that may go, those are taken whose loss is smallest: how likely they are asked for again soon, times
how long it takes to bring them back. A model that is kept for its owner makes no room for anybody else's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, inf

SWAP_SHARE = 0.1
OVERDUE_S = 30.0
"""Who has waited so long comes next, whoever's turn it would be; smaller models may not pass it any more, and kept ones
lie in its way no longer."""
LOOKAHEAD = 4
"""So many are tried when the first can't come yet: a smaller one may find room."""
HORIZON_S = 60.0


@dataclass(frozen=True, slots=True)
class Place:
    """One model. `weights` and `floor` are pages: of its weights, and of the KV cache that it must have at least.
    `start` is its first page on the device (None: it isn't there), `home` where it last was. `since`: when it came to
    the device, or since when it has waited. `swap_s` is what bringing it takes, `redo_s` what computing again takes
    that is lost when it goes. `level` is its neediest tenant's
    (see shares). `requests_s` is how often it is asked for. It is to be `kept` for its owner."""

    name: str
    weights: int
    floor: int
    start: int | None = None
    home: int | None = None
    queued: int = 0
    since: float = 0.0
    movable: bool = True
    swap_s: float = 0.0
    redo_s: float = 0.0
    level: float = 0.0
    requests_s: float = 0.0
    owner: str = ""
    kept: bool = False

    @property
    def pages(self) -> int:
        return self.weights + self.floor

    def loss(self, now: float) -> float:
        """Seconds that sending it away is likely to cost; of those that have work, less for who has had it longer."""
        seconds = self.swap_s + self.redo_s + 1e-6
        if self.queued:
            return seconds * (1 + self.queued) / (1 + max(0.0, now - self.since))
        return seconds * (1 - exp(-self.requests_s * HORIZON_S) + 1e-6)


@dataclass(frozen=True, slots=True)
class Swap:
    """`model` comes to the pages from `start` on; the victims go first."""

    model: str
    start: int
    victims: tuple[str, ...] = ()


def decide(places: Sequence[Place], pages: int, now: float) -> Swap | None:
    """What to do next with an arena of `pages` pages, of which page 0 is nobody's. None: nothing, or not yet."""
    kept = promised(places, pages)
    waiting = [place for place in places if place.start is None and place.queued]
    there = [replace(place, kept=place.name in kept) for place in places if place.start is not None]
    overdue = [place for place in waiting if is_overdue(place, now)]
    for target in sorted(overdue, key=lambda place: place.since)[:1] or sorted(waiting, key=turn)[:LOOKAHEAD]:
        if swap := find_room(target, there, pages, now):
            return swap
    return None


def promised(places: Sequence[Place], pages: int) -> frozenset[str]:
    """Of the models that are to be kept as many as leave room for the largest of all others, the smallest first."""
    promised: list[Place] = []
    for place in sorted((place for place in places if place.kept), key=lambda place: (place.pages, place.name)):
        room = pages - 1 - place.pages - sum(other.pages for other in promised)
        others = (other.pages for other in places if other not in (place, *promised))
        if room >= max(others, default=0):
            promised.append(place)
    return frozenset(place.name for place in promised)


def is_overdue(place: Place, now: float) -> bool:
    return now - place.since > OVERDUE_S


def turn(place: Place) -> tuple[float, float]:
    return place.level, place.since


def quantum(victim: Place, target: Place) -> float:
    """How long a model that has work may run before another one takes its place."""
    return min((target.swap_s + victim.redo_s) * (1 - SWAP_SHARE) / SWAP_SHARE, OVERDUE_S)


def may_go(victim: Place, target: Place, now: float) -> bool:
    if victim.kept and victim.owner != target.owner and not is_overdue(target, now):
        return False
    return victim.movable and (not victim.queued or now - victim.since >= quantum(victim, target))


def find_room(target: Place, there: Sequence[Place], pages: int, now: float) -> Swap | None:
    """The cheapest run of pages that can be had."""
    best, lowest = None, inf
    for start in starts(target, there):
        run = range(start, start + target.weights)
        if run.stop > pages:
            continue
        victims = evict(target, run, there, pages, now)
        # Where it was before, what was captured for those addresses is still good.
        cost = (
            sum(victim.loss(now) for victim in victims) + (start != target.home) * 1e-9 if victims is not None else inf
        )
        if victims is not None and cost < lowest:
            best, lowest = Swap(target.name, start, tuple(victim.name for victim in victims)), cost
    return best


def starts(target: Place, there: Iterable[Place]) -> list[int]:
    """First pages that are worth a look: where others begin or end."""
    runs = [(place.start, place.start + place.weights) for place in there if place.start is not None]
    home = [target.home] if target.home is not None else []
    return sorted({1, *home, *(edge for run in runs for edge in run)})


def evict(target: Place, run: range, there: Sequence[Place], pages: int, now: float) -> list[Place] | None:
    """Who has to go for this run, and so that all KV caches have what they must have; None: somebody may not."""
    victims = [place for place in there if overlaps(place, run)]
    if not all(may_go(victim, target, now) for victim in victims):
        return None
    staying = [place for place in there if place not in victims]
    needed = target.pages + sum(place.pages for place in staying) - (pages - 1)
    candidates = (place for place in staying if may_go(place, target, now))
    for place in sorted(candidates, key=lambda place: place.loss(now) / place.pages):
        if needed <= 0:
            break
        victims.append(place)
        needed -= place.pages
    return victims if needed <= 0 else None


def overlaps(place: Place, run: range) -> bool:
    assert place.start is not None
    return place.start < run.stop and run.start < place.start + place.weights
