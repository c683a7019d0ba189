"""The decisions behind the connections: when there are more, when fewer, and which read gets a second request."""

import math

from hypothesis import given
from hypothesis import strategies as st

from stoker.coldstart.pace import (
    CALM_WINDOWS,
    UNKNOWN_RATE,
    Progress,
    Window,
    adjust,
    is_slow,
    may_hedge,
    slowest,
    typical_rate,
)

MB = 1_000_000


def test_connections_double_while_that_brings_more():
    window = Window(8)
    for goodput, limit in ((400, 16), (800, 32), (1500, 64), (1550, 64), (1560, 64)):
        window = adjust(window, goodput * MB, False, 64)
        assert window.limit == limit


def test_growth_stops_at_the_ceiling():
    assert adjust(Window(48), 1.0, False, 64).limit == 64


def test_a_refusal_halves_and_growth_is_slow_from_then_on():
    window = adjust(Window(32, 900 * MB), 700 * MB, True, 64)
    assert window == Window(16, 700 * MB, 0, True)
    limits = []
    for _ in range(2 * CALM_WINDOWS):
        window = adjust(window, 10_000 * MB, False, 64)
        limits.append(window.limit)
    assert limits == [16] * (CALM_WINDOWS - 1) + [17] * CALM_WINDOWS + [18]
    assert adjust(Window(1), 0.0, True, 64).limit == 1


@given(st.lists(st.tuples(st.floats(0, 1e11), st.booleans()), max_size=60), st.integers(1, 64))
def test_the_limit_stays_within_its_bounds(windows: list[tuple[float, bool]], ceiling: int):
    window = Window(min(8, ceiling))
    for goodput, refused in windows:
        window = adjust(window, goodput, refused, ceiling)
        assert 1 <= window.limit <= ceiling


def reads(*rates: float, age_s: float = 1.0, length: int = 16 * MB) -> list[Progress]:
    return [Progress(number, age_s, int(rate * age_s), length) for number, rate in enumerate(rates)]


def test_a_dripping_connection_among_good_ones_is_found():
    running = reads(80 * MB, 75 * MB, 10_000, 85 * MB, age_s=0.6)
    found = slowest(running, typical_rate([], running))
    assert found and found.chunk == 2


def test_silence_is_the_slowest_of_all():
    running = reads(80 * MB, 10_000, 0, age_s=0.6)
    found = slowest(running, typical_rate([80 * MB] * 3, running))
    assert found and found.chunk == 2 and found.left_s == math.inf


def test_all_equally_slow_is_not_a_tail():
    running = reads(20_000, 21_000, 19_000, 20_500, age_s=30)
    assert slowest(running, typical_rate([], running)) is None


def test_a_read_that_is_young_or_nearly_done_is_left_alone():
    typical = 80 * MB
    assert not is_slow(Progress(0, 0.3, 0, 16 * MB), typical)
    assert not is_slow(Progress(0, 2.0, 15 * MB, 16 * MB), typical)
    assert is_slow(Progress(0, 2.0, 1 * MB, 16 * MB), typical)


def test_a_refused_read_waits_its_time_instead():
    assert not is_slow(Progress(0, 60.0, 0, 16 * MB, refused=True), 80 * MB)


def test_a_lone_read_is_measured_against_a_modest_rate():
    assert typical_rate([], reads(10_000)) == UNKNOWN_RATE
    assert is_slow(Progress(0, 5.0, 50_000, 16 * MB), UNKNOWN_RATE)
    assert not is_slow(Progress(0, 1.0, 10_000, 16 * MB), UNKNOWN_RATE)


def test_extra_bytes_are_bounded():
    chunk, total = 16 * MB, 2000 * MB
    assert may_hedge(0, chunk, 2 * chunk) and may_hedge(3 * chunk, chunk, 2 * chunk)
    assert not may_hedge(4 * chunk, chunk, 2 * chunk)
    assert may_hedge(84 * MB, chunk, total) and not may_hedge(85 * MB, chunk, total)
