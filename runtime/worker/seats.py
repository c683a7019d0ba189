"""Whose jobs a language model's replica takes when it is full: a tenant that has few may take its place beside those
that have more than an equal part, and the engine lets it go first. Pure."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from stoker.queue.records import PRIORITIES, Claim

SPARE_SHARE = 4


class Seats(NamedTuple):
    """`free` jobs may be claimed, `but` none of these tenants'."""

    free: int
    but: frozenset[str] = frozenset()


def seats(most: int, tenants: Iterable[str]) -> Seats:
    """`most` may run at once; `tenants` has the tenant of each that is here. When all places are taken, there are a
    quarter more for those with less than an equal part, one more tenant counted."""
    held = Counter(tenants)
    free = most - held.total()
    if free > 0:
        return Seats(free)
    greedy = frozenset(tenant for tenant, count in held.items() if count * (len(held) + 1) >= most)
    return Seats(max(0, free + -(-most // SPARE_SHARE)), greedy)


def is_patient(claim: Claim) -> bool:
    """A batch's, of the lowest priority."""
    return claim.priority == max(PRIORITIES)
