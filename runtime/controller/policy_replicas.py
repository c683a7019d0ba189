"""How many replicas one function should have, and which of those it has should go: pure functions.

Out: on work that waits, on arrivals that the present replicas can't start within the SLO, on a rising trend. In: a
replica that the highest need of the last while didn't take is drained; the last ones go when the function is idle.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from stoker.runtime.controller.policy_forecast import (
    RATE_WINDOW_S,
    STEADY_S,
    current_rate,
    forecast_rate,
    margin_s,
    service_time,
    staffing,
    surges,
    worth_keeping,
    worth_waking,
)
from stoker.runtime.controller.policy_memory import DEFAULT_LOAD_S, capacity, typical
from stoker.runtime.controller.policy_state import Demand, Failures, Outlook, Placed, Rules, Timing
from stoker.runtime.spec import FunctionSpec

IN_MARGIN = 1.1
BATCH_FILL = 0.75
CALM_STARTS, CALM_S = 2.0, 60.0
LEAST_IDLE_S = 5.0
# What measured times are taken for at the most and the least, and the most replicas that are reckoned with: bounds that
# nothing real comes near, within which no arithmetic here overflows.
LONGEST_S, SHORTEST_S, MOST_REPLICAS = 1e9, 1e-6, 10**9
# What a single job makes of the rate: it says nothing of a next one.
ONE_ARRIVAL = 1 / (STEADY_S + RATE_WINDOW_S)


@dataclass(frozen=True, slots=True)
class Situation:
    """One function as `plan` sees it, `dt` after the last time. `boot_s`: what a host takes that would have to be
    started first (0: there is room on one that runs), `reboot_s` the same had the present ones been given back;
    `price_per_h` is that of one more replica. `coming`: seconds until each of those that start is ready."""

    now: float
    spec: FunctionSpec
    demand: Demand
    outlook: Outlook
    rules: Rules
    timing: Timing
    dt: float = 0.0
    boot_s: float = 0.0
    reboot_s: float = 0.0
    price_per_h: float = 0.0
    coming: tuple[float, ...] = ()

    @property
    def load_s(self) -> float:
        return min(LONGEST_S, self.timing.load_s or typical(self.outlook.loads, DEFAULT_LOAD_S))

    @property
    def start_s(self) -> float:
        return self.boot_s + self.load_s

    @property
    def again_s(self) -> float:
        """What it takes to have a replica again that is given up now."""
        return self.reboot_s + self.load_s

    @property
    def service_s(self) -> float:
        """0 until some were seen."""
        known = self.timing.service_s or service_time(self.outlook)
        return min(LONGEST_S, max(SHORTEST_S, known)) if known else 0.0

    @property
    def patience_s(self) -> float:
        goal = self.spec.slo.ttft_ms
        return goal / 1000 if goal is not None else self.rules.ttft_s

    @property
    def room(self) -> int:
        return self.spec.scaling.target_queue or capacity(self.spec)


@dataclass(frozen=True, slots=True)
class Count:
    """Replicas to have, and the function's memory after deciding so."""

    wanted: int
    outlook: Outlook


def bounded(spec: FunctionSpec, count: int) -> int:
    return min(spec.scaling.max_replicas, max(spec.scaling.min_replicas, count))


def wanted_replicas(at: Situation, current: int, starting: int) -> Count:
    """The number of replicas. Never below min or above max, and at least one while there is work; `current` ones
    (`starting` of them not ready yet) are only given up as the module says."""
    work = at.demand.work > 0
    now, ahead, late = needs(at, current) if work else (*idle_needs(at, current), 0)
    spare = at.spec.scaling.buffer_replicas if work else 0
    now, ahead = now + spare, max(now, ahead) + spare
    highs = fall(at, ahead, late, current)
    wanted = max(ahead, late, min(current, max(count for _, count in highs)) if now else 0)
    if starting or (work and (at.demand.queued or not at.service_s)):
        wanted = max(wanted, current)
    crest = math.ceil((at.demand.queued + at.demand.running) / at.room)
    outlook = replace(at.outlook, highs=highs, crest=max(at.outlook.crest, crest))
    wanted, floor = bounded(at.spec, wanted), bounded(at.spec, max(now, late))
    return Count(wanted, pay(at, outlook, min(wanted, ahead) - floor))


def needs(at: Situation, current: int) -> tuple[int, int, int]:
    """While there is work: the replicas for the arrivals as they are, as they will be when one more could be ready,
    and for the jobs that wait already."""
    jobs = at.demand.queued + at.demand.running
    if not at.service_s or at.spec.scaling.target_queue:
        return max(1, math.ceil(jobs / at.room)), 0, 0
    calm, fast = current_rate(at.outlook), at.outlook.fast
    rate = max(calm, fast) if at.demand.queued and surges(fast, at.outlook.steady) else calm
    now = max(1, staff(at, max(0.0, rate - ONE_ARRIVAL)))
    if at.outlook.credit_usd <= 0 and at.price_per_h:
        return now, 0, overdue(at, calm, current)
    ahead = forecast_rate(at.outlook, at.start_s)
    return now, staff(at, max(0.0, ahead - ONE_ARRIVAL)), overdue(at, (calm + ahead) / 2, current)


def staff(at: Situation, rate: float) -> int:
    """Batches slow down as they grow: until it is known how much, they are planned to be filled in part."""
    guess = at.spec.kind != "python" and not at.outlook.full_s
    room = max(1, int(at.room * BATCH_FILL)) if guess else at.room
    worth = at.rules.cold_weight * at.again_s / at.service_s if at.price_per_h else math.inf
    return staffing(rate * at.service_s, room, at.patience_s / at.service_s, 1 - at.rules.attainment, worth)


def overdue(at: Situation, rate: float, current: int) -> int:
    """Replicas for the jobs that would still wait when one more could be ready: enough to be done with them in as
    long again, and more where that pays: until they are done, all that comes waits behind them. `more` replicas cost a
    start each and take `work_s / more` seconds, each of which makes `rate` jobs late; the sum is least at the root.
    What the present and the coming ones get done by themselves in that time takes no other."""
    # A free place on a host is for the replica that waits for it, if one does.
    start_s = at.again_s if at.outlook.awaited else at.start_s
    waiting = at.demand.queued + at.demand.running - current * at.room
    serving_s = sum((max(0.0, start_s - eta) for eta in at.coming), start=start_s * (current - len(at.coming)))
    left = waiting + rate * start_s - serving_s * at.room / at.service_s
    if left <= 0 or not at.demand.queued:
        return 0
    work_s, goal = left * at.service_s / at.room, max(start_s, at.service_s, at.patience_s)
    eager = math.sqrt(at.rules.cold_weight * rate * work_s) if at.price_per_h else 0.0
    patient = math.ceil(work_s / goal) if waiting > 0 else 0
    return current + max(patient, math.floor(min(eager, left / at.room)))


def idle_needs(at: Situation, current: int) -> tuple[int, int]:
    """Without work: as long as waiting is worth it, one replica (all, where their use isn't known yet); and those that
    a forecast wants beyond the idle timeout. Keeping one spares the price of a start besides the wait for it."""
    age, gaps, worth = at.now - at.outlook.came, at.outlook.gaps, at.rules.cold_weight * at.again_s
    kept_worth = worth + at.again_s + at.rules.host_idle_s
    budget = at.rules.prewarm_usd_per_h
    if current == 0:
        wake = at.price_per_h and not math.isinf(age) and worth_waking(gaps, age, at.start_s + margin_s(age), worth)
        return 0, min(round(median(at.outlook.crests or (1,))), affordable(at, age)) if wake else 0
    lent = at.price_per_h > 0 and budget > 0 and at.outlook.credit_usd > -budget
    keep = worth_keeping(gaps, age, kept_worth, at.again_s if lent else math.inf) if at.price_per_h else None
    if at.demand.idle_s >= at.spec.scaling.idle_timeout_s:
        return 0, current if keep and lent else 0
    if keep is False and at.demand.idle_s >= LEAST_IDLE_S:
        return 0, 0
    return (1 if at.service_s else current), 0


def affordable(at: Situation, age: float) -> int:
    """Replicas whose start and wait the budget pays for."""
    paid = at.outlook.credit_usd * 3600 / (at.price_per_h * (at.start_s + margin_s(age)))
    return int(min(MOST_REPLICAS, max(0.0, paid)))


def fall(at: Situation, need: int, late: int, current: int) -> tuple[tuple[float, int], ...]:
    """The needs of the last while and until when they hold: what decides that a replica may go. A little more than
    the need is held, so that noise about a threshold changes nothing; what only a backlog took, not for long."""
    if at.service_s and at.demand.work:
        need = max(need, min(current, staff(at, IN_MARGIN * current_rate(at.outlook))))
    holds = at.now + max(CALM_S, CALM_STARTS * at.again_s)
    before = at.outlook.highs or ((holds, current),)
    kept = [(until, count) for until, count in before if until > at.now and count > need]
    if late > need:
        kept = [(until, count) for until, count in kept if count > late or until > at.now + CALM_S]
        kept.append((at.now + CALM_S, late))
    return (*kept, (holds, need))


def pay(at: Situation, outlook: Outlook, ahead: int) -> Outlook:
    """The budget less what the replicas of a forecast cost since the last decision."""
    if ahead <= 0 or not at.price_per_h:
        return outlook
    return replace(outlook, credit_usd=outlook.credit_usd - ahead * at.price_per_h * at.dt / 3600)


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of a function's replicas; `missing` more are wanted."""

    keep: tuple[Placed, ...]
    drain: tuple[str, ...]
    missing: int
    count: Count


def plan(at: Situation, placed: tuple[Placed, ...], prices: Mapping[str, float], failed: Failures) -> Plan:
    """`placed`: the function's replicas; `prices`: of a replica on each host that may go on serving."""
    live = [r for r in placed if r.state not in ("failed", "gone")]
    serving = [r for r in live if not r.draining and r.state != "draining" and r.host in prices]
    current = [r for r in serving if r.version == at.spec.version]
    # An older version helps out; one of a function that was deleted in between, and made anew, must not.
    outdated = [r for r in serving if r.version != at.spec.version and r.born == at.spec.born]
    awaited = at.outlook.awaited
    starting = sum(replica.starting for replica in current) + awaited
    count = wanted_replicas(at, max(len(current) + awaited, len(outdated)), starting)
    stay = sorted(current, key=lambda r: (r.state != "ready", prices[r.host], -r.inflight))[: count.wanted]
    missing = max(0, count.wanted - len(stay))
    if missing and failed.version == at.spec.version and at.now < failed.retry_at:
        missing = 0
    if count.wanted and not any(r.serves for r in stay):
        stay += outdated
    staying = {replica.id for replica in stay}
    ending = [r for r in live if r.id not in staying and unfinished(r, at)]
    return Plan((*stay, *ending), tuple(r.id for r in ending), missing, count)


def unfinished(replica: Placed, at: Situation) -> bool:
    """Whether a replica that is to go may be at work: then it takes no more and is waited for. A ready one may have
    claimed a job since its last report, unless the function has none at all."""
    if replica.version != at.spec.version and replica.born != at.spec.born:
        return False
    return replica.inflight > 0 or (replica.state == "ready" and (at.demand.work > 0 or replica.draining))
