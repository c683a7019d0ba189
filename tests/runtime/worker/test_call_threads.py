import threading
import time
from collections.abc import Iterator

import pytest

from stoker.runtime.worker.call_threads import CallThreads

PATIENCE_S = 30


@pytest.fixture
def threads() -> Iterator[CallThreads]:
    made = CallThreads(4)
    yield made
    made.close()


def test_as_many_calls_run_at_once_as_may(threads: CallThreads) -> None:
    """All four have to be inside before any may leave, also when they come in one go."""
    met = threading.Barrier(4, timeout=PATIENCE_S)
    left: list[int] = []

    def call() -> None:
        met.wait()
        left.append(1)

    for _ in range(3):
        threads.submit([call, call, call, call])
    threads.close()
    assert len(left) == 12 and not met.broken


def test_a_call_that_blocks_keeps_none_that_waits_behind_it(threads: CallThreads) -> None:
    release, quick = threading.Event(), threading.Event()
    threads.submit([lambda: release.wait(PATIENCE_S), quick.set])
    assert quick.wait(PATIENCE_S)
    release.set()


def test_calls_that_come_while_all_threads_are_busy_run_when_one_is_free(threads: CallThreads) -> None:
    release = threading.Event()
    threads.submit([lambda: release.wait(PATIENCE_S)] * 4)
    late = threading.Event()
    threads.submit([late.set])
    assert not late.wait(0.05)
    release.set()
    assert late.wait(PATIENCE_S)


def test_never_more_threads_than_calls_at_once(threads: CallThreads) -> None:
    seen: set[int] = set()
    for _ in range(50):
        threads.submit([lambda: seen.add(threading.get_ident())] * 10)
    threads.close()
    assert 1 <= len(seen) <= 4


def test_one_call_at_a_time_needs_one_thread() -> None:
    threads = CallThreads(64)
    seen: set[int] = set()
    for _ in range(20):
        done = threading.Event()

        def call(done: threading.Event = done) -> None:
            seen.add(threading.get_ident())
            done.set()

        threads.submit([call])
        assert done.wait(PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while threads._ended < threads._begun:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    threads.close()
    assert len(seen) == 1


def test_closing_waits_for_what_was_submitted() -> None:
    threads, done = CallThreads(2), []

    def call() -> None:
        time.sleep(0.01)
        done.append(True)

    threads.submit([call] * 6)
    threads.close()
    assert len(done) == 6
