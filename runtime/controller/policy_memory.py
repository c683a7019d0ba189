"""What a decision remembers for the next one: rates, idle times, how long starts take. Pure functions."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median

from stoker.runtime.controller.policy_forecast import SLOW_S, STEADY_S, average
from stoker.runtime.controller.policy_state import Demand, Memory, Outlook, Rules, View

GAPS = 64
STARTS = 16
MIN_GAP_S = 1.0
MEASURE_S = 120.0
LONGEST_STEP_S = 5.0
DEFAULT_LOAD_S = 20.0
CREDIT_H = 1.0


def remember(view: View) -> Memory:
    """The memory brought up to `view`."""
    before = view.memory
    outlooks = {
        name: observe(before.outlooks.get(name), view.demands.get(name, Demand()), view.now, view.rules)
        for name in view.specs
    }
    loading = {
        replica.id: before.loading.get(replica.id, view.now)
        for replica in view.placed
        if replica.starting and not replica.draining
    }
    ready = {replica.id: replica.function for replica in view.placed if replica.state == "ready"}
    for id, since in before.loading.items():
        if ready.get(id) in outlooks:
            outlook = outlooks[ready[id]]
            outlooks[ready[id]] = replace(outlook, loads=(*outlook.loads, view.now - since)[-STARTS:])
    pending = {m.id: before.pending.get(m.id, m.since) for m in view.machines if m.state == "pending"}
    return Memory(outlooks, loading, before.empty, pending, seen_boots(view))


def seen_boots(view: View) -> Mapping[str, tuple[float, ...]]:
    boots = dict(view.memory.boots)
    for machine in view.machines:
        if machine.state == "ready" and machine.id in view.memory.pending:
            took = view.now - view.memory.pending[machine.id]
            boots[machine.pool] = (*boots.get(machine.pool, ()), took)[-STARTS:]
    return boots


def observe(known: Outlook | None, demand: Demand, now: float, rules: Rules) -> Outlook:
    """One function's memory, with its queue as it is now."""
    if known is None:
        rate, credit = demand.arrived_per_s, rules.prewarm_usd_per_h * CREDIT_H
        return Outlook(at=now, steady=rate, slow=rate, idle_from=idle_since(demand, now), credit_usd=credit)
    dt = max(0.0, now - known.at)
    credit = known.credit_usd + rules.prewarm_usd_per_h * dt / 3600
    step = min(dt, LONGEST_STEP_S)
    forget = math.exp(-step / MEASURE_S) if demand.running else 1.0
    return replace(
        rhythm(known, demand, now),
        at=now,
        steady=average(known.steady, demand.arrived_per_s, dt, STEADY_S),
        slow=average(known.slow, demand.arrived_per_s, dt, SLOW_S),
        busy=known.busy * forget + demand.running * step,
        drained=known.drained * forget + demand.drained_per_s * step,
        credit_usd=min(credit, rules.prewarm_usd_per_h * CREDIT_H),
    )


def rhythm(known: Outlook, demand: Demand, now: float) -> Outlook:
    """The idle times between stretches of work, and what each stretch took."""
    if not demand.work:
        if known.idle_from is not None or math.isinf(demand.idle_s):
            return known
        return replace(known, idle_from=idle_since(demand, now), crests=(*known.crests, known.crest)[-GAPS:], crest=0)
    if known.idle_from is None:
        return known
    gap = now - known.idle_from
    gaps = (*known.gaps, gap)[-GAPS:] if gap >= MIN_GAP_S else known.gaps
    return replace(known, idle_from=None, gaps=gaps)


def idle_since(demand: Demand, now: float) -> float | None:
    return None if demand.work or math.isinf(demand.idle_s) else now - demand.idle_s


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
