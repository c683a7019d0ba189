"""What to expect of a function: its arrivals a few seconds ahead, how many replicas they take, and whether an idle
replica is worth its price. Pure functions of what was seen.

Staffing is the delay formula of the M/M/s queue (A. K. Erlang, 1917); the idle rules compare the chance of an arrival
with the price of waiting for it on the empirical distribution of idle times, as hybrid histograms do
(M. Shahrad et al., Serverless in the Wild, USENIX ATC 2020).
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

from stoker.runtime.controller.policy_state import Outlook

RATE_WINDOW_S = 20.0
STEADY_S, SLOW_S = 60.0, 300.0
SURPRISE, TREND = 2.5, 2.0
MIN_SAMPLES = 8
GRID = 1.02
MANY_SERVERS = 1000.0


def average(before: float, sample: float, dt: float, window_s: float) -> float:
    """An exponential moving average, `dt` seconds on."""
    return sample + (before - sample) * math.exp(-dt / window_s)


def service_time(outlook: Outlook) -> float:
    """Mean seconds that a job runs (J. Little, 1961: time running over jobs done); 0 until two were seen."""
    return outlook.busy / outlook.drained if outlook.drained >= 2.0 else 0.0


def current_rate(outlook: Outlook, fast: float) -> float:
    """Arrivals per second now: over about a minute, unless the last seconds differ by more than chance allows."""
    chance = math.sqrt(max(outlook.steady, 1 / RATE_WINDOW_S) / (2 * RATE_WINDOW_S))
    return fast if abs(fast - outlook.steady) > SURPRISE * chance else outlook.steady


def forecast_rate(outlook: Outlook, fast: float, ahead_s: float) -> float:
    """Arrivals per second in `ahead_s`: the rate now plus its trend, where that is more than chance; at most double."""
    now = current_rate(outlook, fast)
    lag, slow_lag = STEADY_S + RATE_WINDOW_S, SLOW_S + RATE_WINDOW_S
    chance = math.sqrt(outlook.slow / (2 * lag) + outlook.slow / (2 * slow_lag))
    rise = outlook.steady - outlook.slow
    if rise <= TREND * chance:
        return now
    since = RATE_WINDOW_S if now == fast else lag
    return min(2 * now, now + rise / (slow_lag - lag) * (since + ahead_s))


def staffing(load: float, room: int, patience: float, miss: float) -> int:
    """Replicas of `room` servers each so that at most `miss` of the jobs wait longer than `patience` service times,
    at an offered `load` (arrivals per service time)."""
    if load <= 0:
        return 0
    return _staffing(math.ceil(math.log(load) / math.log(GRID)), room, round(patience, 2), miss)


@lru_cache(maxsize=65536)
def _staffing(step: int, room: int, patience: float, miss: float) -> int:
    load = GRID**step
    replicas = max(1, math.ceil(load / room))
    if load > MANY_SERVERS:
        return math.ceil((load + 2 * math.sqrt(load)) / room)
    blocked, servers = 1.0, 0
    while True:
        while servers < replicas * room:
            servers += 1
            blocked = load * blocked / (servers + load * blocked)
        spare = servers - load
        if spare > 0:
            waits = servers * blocked / (servers - load * (1 - blocked))
            if waits * math.exp(-spare * patience) <= miss:
                return replicas
        replicas += 1


def worth_keeping(gaps: Sequence[float], age: float, worth_s: float) -> bool | None:
    """Whether a replica that has been idle for `age` should wait on: for some time ahead the chance of work is worth
    the idle seconds. `worth_s`: idle seconds that an avoided cold start is worth. None: too few idle times were seen
    that lasted so long."""
    ahead = sorted(gap - age for gap in gaps if gap >= age)
    if len(ahead) < MIN_SAMPLES:
        return None
    waited = 0.0
    for index, wait in enumerate(ahead):
        waited += wait
        if (index + 1) * worth_s >= waited + (len(ahead) - index - 1) * wait:
            return True
    return False


def worth_waking(gaps: Sequence[float], age: float, load_s: float, worth_s: float) -> bool:
    """Whether a start now, ready in `load_s`, comes just before work is likely, after `age` without any."""
    ahead = sorted(gap for gap in gaps if gap >= age)
    if len(ahead) < MIN_SAMPLES:
        return False
    window = max(5.0, 0.05 * age)
    due = bisect_left(ahead, age + load_s + window) - bisect_left(ahead, age + load_s)
    return due * worth_s > window * len(ahead)
