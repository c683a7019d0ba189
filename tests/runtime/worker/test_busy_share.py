from hypothesis import given
from hypothesis import strategies as st

from stoker.runtime.worker.busy_share import BusyShare


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_jobs_at_once_share_the_time_equally() -> None:
    clock = Clock()
    share = BusyShare(clock)
    share.begin("a")
    clock.now = 2.0
    share.begin("b")
    clock.now = 6.0
    assert share.end("a") == 2.0 + 2.0
    clock.now = 7.0
    assert share.end("b") == 2.0 + 1.0
    assert share.end("b") == share.end("unknown") == 0.0


def test_a_job_alone_has_all_of_it_and_idle_time_is_nobodys() -> None:
    clock = Clock()
    share = BusyShare(clock)
    clock.now = 10.0
    share.begin("a")
    clock.now = 13.0
    assert share.end("a") == 3.0
    clock.now = 20.0
    share.begin("b")
    clock.now = 20.5
    assert share.end("b") == 0.5


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 1000)), max_size=60))
def test_what_jobs_were_given_adds_up_to_the_busy_time(steps: list[tuple[bool, int, int]]) -> None:
    clock, given_s, busy_s = Clock(), 0.0, 0.0
    share, held = BusyShare(clock), set[str]()
    for begins, number, milliseconds in steps:
        clock.now += milliseconds / 1000
        busy_s += milliseconds / 1000 if held else 0.0
        job = str(number)
        if begins and job not in held:
            share.begin(job)
            held.add(job)
        elif not begins and job in held:
            given_s += share.end(job)
            held.discard(job)
    given_s += sum(share.end(job) for job in sorted(held))
    assert abs(given_s - busy_s) < 1e-6
