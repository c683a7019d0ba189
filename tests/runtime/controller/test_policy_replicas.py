import math
import random

from stoker.runtime.controller.policy_forecast import worth_keeping, worth_waking
from stoker.runtime.controller.policy_replicas import Situation, needs, overdue
from stoker.runtime.controller.policy_state import Demand, Outlook, Rules, Timing
from stoker.runtime.spec import FunctionSpec, Scaling

SPEC = FunctionSpec("f", "python", scaling=Scaling(0, 100))


def waiting(queued: int, price: float = 4.0, coming: tuple[float, ...] = (), rate: float = 0.0) -> Situation:
    """One job at a time, 4 s each; a replica takes 90 s to boot and 10 s to load."""
    outlook = Outlook(at=0.0, fast=rate, steady=rate, slow=rate, credit_usd=1.0)
    demand = Demand(queued=queued, running=1, idle_s=0.0)
    timing = Timing(load_s=10.0, service_s=4.0)
    return Situation(0.0, SPEC, demand, outlook, Rules(), timing, 1.0, 90.0, 90.0, price, coming)


def test_more_are_ordered_than_the_backlog_needs_where_what_comes_would_wait_behind_it() -> None:
    left = 100 + 1.0 * 100 - 100 / 4
    assert overdue(waiting(100, price=0.0), 1.0, 1) == 1 + math.ceil(left * 4 / 100), "done in as long as a start"
    paid = overdue(waiting(100), 1.0, 1)
    assert paid == 1 + math.floor(math.sqrt(5.0 * 1.0 * left * 4)), "each replica's start against a late job's worth"
    assert overdue(waiting(100), 0.0, 1) == 1 + math.ceil((100 - 25) * 4 / 100), "nothing comes behind it"


def test_replicas_that_are_soon_ready_count_for_what_they_will_have_done() -> None:
    soon, late = (5.0,) * 12, (99.0,) * 12
    assert overdue(waiting(100, coming=soon), 1.0, 13) == 0
    assert overdue(waiting(100, coming=late), 1.0, 13) > 13


def test_one_arrival_is_no_rate() -> None:
    assert needs(waiting(1, rate=1 / 80), 0)[0] == 1
    assert needs(waiting(1, rate=1.0), 0)[0] > 4


def test_a_replica_without_rhythm_stays_while_that_is_cheaper_than_starting_anew() -> None:
    chance = random.Random(1)
    gaps = [chance.expovariate(1 / 600) for _ in range(64)]
    for age in (5.0, 60.0, 300.0):
        assert worth_keeping(gaps, age, 700.0, again_s=106.0)
    assert not all(worth_keeping(gaps, float(age), 20.0, again_s=106.0) for age in range(300))
    assert not any(worth_waking(gaps[:32], age, 106.0, 30.0) for age in (5.0, 60.0, 300.0))


def test_a_replica_with_a_rhythm_goes_and_comes_back_in_time() -> None:
    gaps = [900.0 + shift for shift in range(-4, 5)] * 3
    assert not worth_keeping(gaps, 10.0, 700.0, again_s=106.0)
    assert not worth_waking(gaps, 500.0, 106.0, 530.0) and worth_waking(gaps, 775.0, 106.0, 530.0)
