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
SURGE_S, SURGE_KEPT = 5.0, 0.85
MOST_RISE = 2.0
MIN_SAMPLES = 8
LEAST_RHYTHM, LEAST_DUE = 0.1, 3
GRID = 1.02
MANY_SERVERS = 1000.0
# More replicas than any function may have take it, and still a number that the rest can be calculated with.
MOST_LOAD = 1e12
NEVER_BLOCKED = 1e-30


def average(before: float, sample: float, dt: float, window_s: float) -> float:
    """An exponential moving average, `dt` seconds on."""
    return sample + (before - sample) * math.exp(-dt / window_s)


def service_time(outlook: Outlook) -> float:
    """Mean seconds that a job runs, the longer one of lately and of when replicas were full: a batch slows down as it
    grows. 0 until some were seen."""
    return max(outlook.service_s, outlook.full_s)


def chance_of(rate: float) -> float:
    """The standard deviation of the fast average of so many arrivals per second."""
    return math.sqrt(max(rate, 1 / RATE_WINDOW_S) / (2 * RATE_WINDOW_S))


def surges(fast: float, steady: float) -> bool:
    """Whether the last seconds brought more than chance allows."""
    return fast - steady > SURPRISE * chance_of(steady)


def current_rate(outlook: Outlook) -> float:
    """Arrivals per second now: over about a minute, unless the last seconds say otherwise: fewer at once, more only
    when it lasts, since a batch that comes at once is soon over."""
    fast, steady = outlook.fast, outlook.steady
    lasts = outlook.at - outlook.surged >= SURGE_S and fast >= SURGE_KEPT * outlook.peak
    if surges(fast, steady):
        return fast if lasts else steady
    return fast if steady - fast > SURPRISE * chance_of(steady) else steady


def forecast_rate(outlook: Outlook, ahead_s: float) -> float:
    """Arrivals per second in `ahead_s`: the rate now plus its trend, where that is more than chance; at most
    `MOST_RISE` times the rate now."""
    now = current_rate(outlook)
    lag, slow_lag = STEADY_S + RATE_WINDOW_S, SLOW_S + RATE_WINDOW_S
    chance = math.sqrt(outlook.slow / (2 * lag) + outlook.slow / (2 * slow_lag))
    rise = outlook.steady - outlook.slow
    if now == outlook.fast > outlook.steady:
        ahead = now + (outlook.fast - outlook.steady) / STEADY_S * (RATE_WINDOW_S + ahead_s)
    elif rise > TREND * chance:
        ahead = now + rise / (slow_lag - lag) * (lag + ahead_s)
    else:
        return now
    return min(MOST_RISE * now, ahead)


def staffing(load: float, room: int, patience: float, miss: float, worth: float) -> int:
    """Replicas of `room` servers each so that at most `miss` of the jobs wait longer than `patience` service times, at
    an offered `load` (arrivals per service time); but none that spares less than it costs, when each service time of a
    replica costs as much as `1 / worth` jobs that wait too long."""
    if load <= 0:
        return 0
    step = math.ceil(math.log(min(load, MOST_LOAD)) / math.log(GRID))
    return _staffing(step, room, round(patience, 2), miss, float(f"{worth:.1e}"))


@lru_cache(maxsize=65536)
def _staffing(step: int, room: int, patience: float, miss: float, worth: float) -> int:
    load = GRID**step
    replicas = max(1, math.ceil(load / room))
    if load > MANY_SERVERS:
        return math.ceil((load + 2 * math.sqrt(load)) / room)
    before = 1.0
    while True:
        late = waiting_longer(load, replicas * room, patience)
        if before < 1.0 and load * (before - late) * worth < 1.0:
            return replicas - 1
        if late <= miss:
            return replicas
        before, replicas = late, replicas + 1


def waiting_longer(load: float, servers: int, patience: float) -> float:
    """The share of jobs of an M/M/s queue that wait longer than `patience` service times (Erlang's C formula)."""
    if servers <= load:
        return 1.0
    blocked = 1.0
    for server in range(1, servers + 1):
        blocked = load * blocked / (server + load * blocked)
        if blocked < NEVER_BLOCKED:
            return 0.0
    waits = servers * blocked / (servers - load * (1 - blocked))
    return waits * math.exp(-(servers - load) * patience)


def worth_keeping(gaps: Sequence[float], age: float, worth_s: float, again_s: float = math.inf) -> bool | None:
    """Whether a replica that has been idle for `age` should wait on: for some time ahead the chance of work is worth
    the idle seconds. `worth_s`: idle seconds that an avoided cold start is worth; where the work
    comes on time, only that in less than `again_s` (and a margin) counts: before later work it could be started anew.
    It goes only where the few idle times that lasted so long say so by more than two standard errors. None: there are
    too few."""
    ahead = sorted(max(0.0, gap - age) for gap in gaps if gap >= age - margin_s(age))
    if len(ahead) < MIN_SAMPLES:
        return None
    timely = ahead[len(ahead) * 3 // 4] - ahead[len(ahead) // 4] < again_s
    waited, worth_s = 0.0, worth_s * (1 + 2 / math.sqrt(len(ahead)))
    for index, wait in enumerate(ahead):
        waited += wait
        if timely and wait > again_s + margin_s(age):
            return False
        if (index + 1) * worth_s >= waited + (len(ahead) - index - 1) * wait:
            return True
    return False


def margin_s(age: float) -> float:
    """How far idle times of about `age` are taken to be off."""
    return max(5.0, 0.05 * age)


def worth_waking(gaps: Sequence[float], age: float, load_s: float, worth_s: float) -> bool:
    """Whether a start now, ready in `load_s`, comes just before work is likely, after `age` without any: worth the
    price, and no mere accident of the times that were seen."""
    ahead = sorted(gap for gap in gaps if gap >= age)
    if len(ahead) < MIN_SAMPLES:
        return False
    window = margin_s(age)
    due = bisect_left(ahead, age + load_s + window) - bisect_left(ahead, age + load_s)
    return due * worth_s > window * len(ahead) and due >= max(LEAST_DUE, LEAST_RHYTHM * len(ahead))
