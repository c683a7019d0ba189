"""Which blocks of the prompt cache are worth keeping while a model sleeps. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple


class Candidate(NamedTuple):
    """A block that was of use: after block `parent` (empty: first of its chain). It is at `place`: a block of the
    device, or a slot of the second tier if it's `on_host`."""

    key: bytes
    parent: bytes
    tokens: bytes
    uses: int
    place: int
    on_host: bool = False


def hottest(candidates: Mapping[bytes, Candidate], most: int) -> list[Candidate]:
    """Up to `most` of them, the most used first, each behind the one that it continues: what is computed after a block
    that is missing can't be found."""
    after: dict[bytes, list[Candidate]] = defaultdict(list)
    for candidate in candidates.values():
        after[candidate.parent].append(candidate)
    chosen: list[Candidate] = []
    open_ends = [order(candidate) for candidate in after[b""]]
    heapify(open_ends)
    while open_ends and len(chosen) < most:
        *_, key = heappop(open_ends)
        chosen.append(candidates[key])
        for candidate in after[key]:
            heappush(open_ends, order(candidate))
    return chosen


def order(candidate: Candidate) -> tuple[int, bytes]:
    return -candidate.uses, candidate.key


def is_cheaper(size: int, fetch_bytes_s: float, tokens: int, token_s: float) -> bool:
    """Whether to fetch `size` bytes is likely to be quicker than to compute their `tokens` again. What was never
    measured (0) is no reason against it: the first fetch measures."""
    if not fetch_bytes_s or not token_s:
        return size > 0
    return 0 < size / fetch_bytes_s < tokens * token_s


def parents(rows: Iterable[Candidate]) -> list[int]:
    """For each its parent's place among them, -1 for the first of a chain."""
    places = {b"": -1}
    found: list[int] = []
    for place, row in enumerate(rows):
        found.append(places[row.parent])
        places[row.key] = place
    return found


def longest(parents: Sequence[int]) -> int:
    """Blocks of the longest chain."""
    lengths: list[int] = []
    for parent in parents:
        lengths.append(1 + (lengths[parent] if parent >= 0 else 0))
    return max(lengths, default=0)
