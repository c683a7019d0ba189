"""Which failures are tried again, how often, and for how long."""

import threading
import time

import pytest

from stoker.coldstart.failures import FetchCancelled, ObjectMissing, StoreUnavailable
from stoker.coldstart.retry import Transient, persist
from stoker.coldstart.store import ReadWatch


def failing(times: int, progressed: bool = False):
    left = [times]

    def attempt() -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise Transient(StoreUnavailable("x", (0, 9), "busy"), progressed)
        return "done"

    return attempt


def test_transient_failures_pass_and_are_counted():
    watch = ReadWatch()
    assert persist(failing(2), watch, budget_s=10) == "done"
    assert watch.retries == 2


def test_other_failures_are_final():
    calls = []

    def attempt() -> None:
        calls.append(1)
        raise ObjectMissing("x", None, "gone")

    with pytest.raises(ObjectMissing):
        persist(attempt, ReadWatch(), budget_s=10)
    assert len(calls) == 1


def test_the_budget_ends_it_with_the_last_failure():
    start = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"busy \(attempt \d+") as caught:
        persist(failing(10**6), ReadWatch(), budget_s=0.3)
    assert caught.value.range == (0, 9)
    assert time.monotonic() - start < 2


def test_progress_renews_the_budget():
    """Without that, the pauses grow to 16 s in all."""
    assert persist(failing(8, progressed=True), ReadWatch(), budget_s=1) == "done"


def test_stop_interrupts_the_wait():
    watch = ReadWatch()
    threading.Timer(0.1, watch.stop.set).start()
    start = time.monotonic()
    with pytest.raises(FetchCancelled):
        persist(failing(10**6), watch, budget_s=60)
    assert time.monotonic() - start < 3
