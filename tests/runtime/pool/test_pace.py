"""What a batch has of a device when nobody else is there: nothing just after others, short steps for a while, then
all."""

import pytest

from stoker.runtime.pool.pace import BATCH_STEP_S, LEAST_TOKENS, LIVELY_S, REST_S, RESTED_MOST_S, Pace

BUDGET = 8192
MS = 1_000_000
SOON, LATER = round(REST_S * 1e9) + MS, round(LIVELY_S * 1e9) + MS


def others(pace: Pace, at_ns: int) -> None:
    pace.settled([(1, False), (1, True)], at_ns - MS, at_ns)


def test_a_batch_that_is_alone_has_whole_steps() -> None:
    pace = Pace(1)
    assert (pace.rest_s(0), pace.patient_step_tokens(0, BUDGET)) == (0, BUDGET)
    pace.settled([(1, True)], 0, MS)
    assert (pace.rest_s(MS), pace.patient_step_tokens(MS, BUDGET)) == (0, BUDGET)


def test_behind_others_it_rests_and_then_takes_short_steps() -> None:
    pace = Pace(1)
    others(pace, 5 * MS)
    assert pace.rest_s(5 * MS) == REST_S
    assert pace.rest_s(10 * MS) == pytest.approx(REST_S - 0.005)
    assert pace.patient_step_tokens(5 * MS + SOON, BUDGET) == LEAST_TOKENS
    pace.settled([(400, False)], 0, 40 * MS)
    assert pace.patient_step_tokens(40 * MS + SOON, BUDGET) == int(BATCH_STEP_S / pace.token_s) > LEAST_TOKENS
    assert pace.patient_step_tokens(40 * MS + LATER, BUDGET) == BUDGET


def test_traffic_that_never_pauses_for_long_does_not_keep_a_batch_from_the_device() -> None:
    """A request of 2 ms every 12 ms: when the device has been idle for long enough in all, a batch has a step."""
    pace, at, batch, rests = Pace(1), 0, 0, 0
    for _ in range(1000):
        pace.settled([(1, False)], at, at + 2 * MS)
        at += 12 * MS
        if pace.rest_s(at - 9 * MS):
            rests += 1
            continue
        pace.settled([(16, True)], at - 9 * MS, at - 2 * MS)
        batch += 1
    assert rests + batch == 1000
    assert 1000 * 0.01 / (RESTED_MOST_S + 0.02) <= batch <= 1000 * 0.01 / RESTED_MOST_S
