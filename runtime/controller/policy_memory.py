"""What a decision remembers for the next one: rates, idle times, how long starts take. Pure functions."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median

from stoker.runtime.controller.policy_forecast import RATE_WINDOW_S, SLOW_S, STEADY_S, average, surges
from stoker.runtime.controller.policy_state import Demand, Memory, Outlook, Rules, View
from stoker.runtime.spec import FunctionSpec

GAPS = 64
STARTS = 16
MIN_GAP_S = 1.0
MEASURE_S = 120.0
LEAST_JOBS = 2.0
PAUSED = 0.0005
FULL_SLACK = 0.1
FULL_FOR_S = 14_400.0
LONGEST_STEP_S = 5.0
DEFAULT_LOAD_S = 20.0
CREDIT_H = 1.0


def remember(view: View) -> Memory:
    """The memory brought up to `view`."""
    before = view.memory
    outlooks = {
        name: observe(
            before.outlooks.get(name), view.demands.get(name, Demand()), view.now, view.rules, seats_of(view, spec)
        )
        for name, spec in view.specs.items()
    }
    loading = {
        replica.id: before.loading.get(replica.id, view.now)
        for replica in view.placed
        if replica.starting and not replica.draining
    }
    ready = {r.id: r.function for r in view.placed if r.state == "ready"} if before.loading else {}
    for id, since in before.loading.items():
        if ready.get(id) in outlooks:
            outlook = outlooks[ready[id]]
            outlooks[ready[id]] = replace(outlook, loads=(*outlook.loads, view.now - since)[-STARTS:])
    pending = {m.id: before.pending.get(m.id, m.since) for m in view.machines if m.state == "pending"}
    return Memory(outlooks, loading, before.empty, pending, seen_boots(view))


def seats_of(view: View, spec: FunctionSpec) -> int:
    ready = sum(r.function == spec.name and r.state == "ready" and not r.draining for r in view.placed)
    return ready * capacity(spec)


def capacity(spec: FunctionSpec) -> int:
    """Jobs that one replica runs at once."""
    if spec.kind != "python":
        return spec.model.max_seqs
    return spec.concurrency * (spec.batch.max_size if spec.batch else 1)


def seen_boots(view: View) -> Mapping[str, tuple[float, ...]]:
    boots = dict(view.memory.boots)
    for machine in view.machines:
        if machine.state == "ready" and machine.id in view.memory.pending:
            took = view.now - view.memory.pending[machine.id]
            boots[machine.pool] = (*boots.get(machine.pool, ()), took)[-STARTS:]
    return boots


def observe(known: Outlook | None, demand: Demand, now: float, rules: Rules, seats: int) -> Outlook:
    """One function's memory, with its queue as it is now; its ready replicas run `seats` jobs at once."""
    credit = rules.prewarm_usd_per_h * CREDIT_H
    if known is None or math.isinf(known.at):
        return first_look(known or Outlook(came=came_at(demand, now), credit_usd=credit), demand, now)
    dt = max(0.0, now - known.at)
    woke = now if known.told < PAUSED else since_pause(known.woke, demand.arrived_per_s, now)
    drain_woke = since_pause(known.drain_woke, demand.drained_per_s, now)
    fast, drained = plain_rate(demand.arrived_per_s, now - woke), plain_rate(demand.drained_per_s, now - drain_woke)
    steady = average(known.steady, fast, dt, STEADY_S)
    surged = min(known.surged, now) if surges(fast, steady) else math.inf
    known = replace(known, woke=woke, drain_woke=drain_woke)
    return replace(
        measure(rhythm(known, demand, now), demand.running, drained, min(dt, LONGEST_STEP_S), seats),
        at=now,
        fast=fast,
        steady=steady,
        surged=surged,
        peak=0.0 if math.isinf(surged) else max(known.peak, fast),
        slow=average(known.slow, fast, dt, SLOW_S),
        credit_usd=min(known.credit_usd + rules.prewarm_usd_per_h * dt / 3600, credit),
    )


def first_look(known: Outlook, demand: Demand, now: float) -> Outlook:
    """What another controller may have learned, with the rates as the queue tells them."""
    rate = demand.arrived_per_s
    return replace(known, at=now, fast=rate, steady=rate, slow=rate, told=rate, idle=not demand.work)


def measure(known: Outlook, running: int, drained: float, step: float, seats: int) -> Outlook:
    """The mean time of a job: seconds of running over jobs done (J. Little, 1961), the running ones counted as half
    done, and those done that the moving average hasn't told of yet as done. `full_s` is the same of the last seconds
    alone, once all `seats` were taken for longer than a job takes."""
    forget = math.exp(-step / MEASURE_S) if running else 1.0
    busy_s, done = known.busy_s * forget + running * step, known.done * forget + drained * step
    jobs = done + drained * RATE_WINDOW_S
    service_s = busy_s / (jobs + running / 2) if jobs >= LEAST_JOBS else known.service_s
    crowded = 0 < seats == known.seats and seats <= running + FULL_SLACK * seats
    crowded_s = known.crowded_s + step if crowded else 0.0
    full_s = average(known.full_s, service_s, step, FULL_FOR_S) if known.full_s else 0.0
    if drained and crowded_s > RATE_WINDOW_S + service_s:
        full_s = average(full_s or service_s, running / drained, step, STEADY_S)
    return replace(
        known, busy_s=busy_s, done=done, service_s=service_s, crowded_s=crowded_s, full_s=full_s, seats=seats
    )


def since_pause(before: float, rate: float, now: float) -> float:
    """When events began again after a pause; as long as there are none, now."""
    return now if rate < PAUSED else before


def plain_rate(rate: float, age_s: float) -> float:
    """The queue's average without its correction for a short past: one event after a pause is no rate of one a second,
    and must not start replicas for it."""
    return rate * (1 - math.exp(-max(age_s, 1.0) / RATE_WINDOW_S))


def rhythm(known: Outlook, demand: Demand, now: float) -> Outlook:
    """When work came and what a stretch of it took. Pauses are counted from arrival to arrival: how long the work
    between them ran depends on the cold start that a better forecast would spare it."""
    came = demand.arrived_per_s > known.told or (demand.work > 0 and known.idle)
    if came and known.idle and now - known.came >= MIN_GAP_S and not math.isinf(known.came):
        known = replace(known, gaps=(*known.gaps, now - known.came)[-GAPS:])
    if not demand.work and not known.idle:
        known = replace(known, crests=(*known.crests, known.crest)[-GAPS:], crest=0)
    return replace(known, told=demand.arrived_per_s, idle=not demand.work, came=now if came else known.came)


def came_at(demand: Demand, now: float) -> float:
    """About when the last work came, as far as a first look tells."""
    return now if demand.work else now - demand.idle_s


def typical(seen: Iterable[float], unknown: float) -> float:
    """The median of measured times, or `unknown` without any."""
    values = tuple(seen)
    return median(values) if values else unknown


def price_per_h(view: View, gpu: str) -> float:
    """What one more replica costs an hour in the cheapest pool that fits; 0 where hosts cost nothing."""
    prices = [pool.replica_price_per_h for pool in view.pools if pool_fits(gpu, pool.gpu, pool.devices)]
    return min(prices, default=0.0)


def pool_fits(wanted: str, gpu: str, devices: tuple[str, ...]) -> bool:
    """Whether a host with `devices` of kind `gpu` can run a function that wants `wanted` ("": anything)."""
    if not wanted:
        return True
    return any(device != "cpu" for device in devices) and wanted.lower() in ("any", gpu.lower())
