"""Repeats what may pass: full-jitter exponential backoff within a time budget.

Source of the jitter: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
"""

import random
import time
from collections.abc import Callable
from typing import TypeVar

from stoker.coldstart.failures import ColdStartError, FetchCancelled
from stoker.coldstart.store import ReadWatch

FIRST_CEILING_S = 0.1
LAST_CEILING_S = 5.0

T = TypeVar("T")


class Transient(Exception):
    """An attempt failed in a way that may pass; `progressed` when it brought the goal well nearer all the same,
    `refused` when the other side has too much to do."""

    def __init__(self, failure: ColdStartError, progressed: bool = False, refused: bool = False) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.progressed = progressed
        self.refused = refused


def persist(attempt: Callable[[], T], watch: ReadWatch, budget_s: float) -> T:
    """Calls `attempt` until it returns, raises something else than Transient, or made no progress for `budget_s`.

    Then raises the last attempt's failure. Raises FetchCancelled soon after `watch.stop` is set.
    """
    began, tries, ceiling = time.monotonic(), 0, FIRST_CEILING_S
    while True:
        tries += 1
        try:
            return attempt()
        except Transient as problem:
            watch.refusals += problem.refused
            if problem.progressed:
                began, ceiling = time.monotonic(), FIRST_CEILING_S
            delay = random.uniform(0, ceiling)
            spent = time.monotonic() - began
            if spent + delay > budget_s:
                raise exhausted(problem.failure, tries, spent) from problem
            if watch.stop.wait(delay):
                raise cancelled(problem.failure) from problem
        watch.retries += 1
        ceiling = min(2 * ceiling, LAST_CEILING_S)


def exhausted(failure: ColdStartError, tries: int, spent_s: float) -> ColdStartError:
    return type(failure)(failure.object, failure.range, f"{failure.reason} (attempt {tries}, {spent_s:.1f} s)")


def cancelled(failure: ColdStartError) -> FetchCancelled:
    return FetchCancelled(failure.object, failure.range, "the read was cancelled")
