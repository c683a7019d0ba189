"""How many replicas each function should have, where, and how many hosts there should be: one pure function of a view.

The controller, the simulator and the tests call the same `decide`; it keeps nothing: what it must remember travels
in `Decision.memory`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stoker.runtime.controller.policy_hosts import (
    Fleet,
    Spot,
    boot_s,
    empty_since,
    has_seat,
    order,
    place,
    replica_prices,
    retired,
    seconds,
    spots,
)
from stoker.runtime.controller.policy_memory import price_per_h, remember
from stoker.runtime.controller.policy_reasons import Case, explain
from stoker.runtime.controller.policy_replicas import Plan, Situation
from stoker.runtime.controller.policy_rollout import Trial, fallbacks, on_trial, plan_beside, trial_name
from stoker.runtime.controller.policy_state import Decision, Demand, Failures, Machine, Memory, Outlook, Timing, View
from stoker.runtime.spec import FunctionSpec

MAX_BACKOFF_S = 30.0
MAX_CRASH_PAUSE_S = 2.0
CRASHES_FORGOTTEN_S = 10.0
FIRST_BACKOFF_S = 0.5

Wanted = dict[str, dict[str, dict[str, Any]]]


def decide(view: View) -> Decision:
    failures = remember_failures(view)
    served = fallbacks(view, failures)
    if not served:
        return settle(view, {}, failures)
    trials = {name: Trial(view.specs[name], failures[name].retry_at) for name in served}
    proven_failures = remember_failures(replace(view, specs=served, failures=view.proven_failures))
    decision = settle(replace(view, specs={**view.specs, **served}), trials, {**failures, **proven_failures})
    return replace(decision, failures=failures, served=served, proven_failures=proven_failures)


def settle(view: View, trials: Mapping[str, Trial], failures: Mapping[str, Failures]) -> Decision:
    """`view.specs` are the versions that serve; the newest one, where it is another, is in `trials`."""
    before, view = view.memory, replace(view, memory=remember(view))
    free, prices = spots(view, view.placed), replica_prices(view)
    at = {name: situation(view, before, spec, free) for name, spec in view.specs.items()}
    placed = {name: tuple(r for r in view.placed if r.function == name and r.host in view.hosts) for name in view.specs}
    failed = {name: failures.get(name, Failures()) for name in view.specs}
    trying = {name: on_trial(trial.spec, placed[name], prices) for name, trial in trials.items()}
    plans = {name: plan_beside(trying.get(name, ()), at[name], placed[name], prices, failed[name]) for name in at}
    keep = tuple(replica for each in plans.values() for replica in each.keep)
    keep += tuple(r for r in view.placed if r.function in view.held and r.host in view.hosts)
    due = {trial_name(n): t.spec for n, t in trials.items() if not trying[n] and t.is_due(view.now, plans[n])}
    seating = replace(view, specs={**view.specs, **due}) if due else view
    missing = [name for name, each in plans.items() for _ in range(each.missing)]
    seated, unplaced = place(seating, keep, [*missing, *due])
    ordered, awaited = order(seating, unplaced)
    empty = empty_since(view, {replica.host for replica in keep} | {host for _, host, _ in seated})
    going = retired(view, ordered, empty)
    cases = {
        name: Case(at[name], plans[name], unplaced.count(name), failed[name])
        for name in view.specs
        if at[name].demand.queued or name in unplaced
    }
    return Decision(
        keep,
        tuple(each for each in seated if each[0] not in due),
        failures,
        drain=tuple(id for each in plans.values() for id in each.drain),
        hosts={fleet.pool.name: fleet.count - left(fleet, going) for fleet in ordered},
        retire=tuple(machine.id for machine in going),
        reasons={name: explain(view, case, ordered) for name, case in cases.items()},
        actions=tuple(actions(view, plans, seated, ordered, going)),
        memory=replace(view.memory, outlooks=outlooks_after(plans, awaited), empty=empty),
        trials=tuple((due[name].name, host, device) for name, host, device in seated if name in due),
    )


def outlooks_after(plans: Mapping[str, Plan], awaited: list[str]) -> dict[str, Outlook]:
    return {name: replace(each.count.outlook, awaited=awaited.count(name)) for name, each in plans.items()}


def situation(view: View, before: Memory, spec: FunctionSpec, free: list[Spot]) -> Situation:
    known, again = before.outlooks.get(spec.name), boot_s(view, spec.gpu)
    at = Situation(
        view.now,
        spec,
        view.demands.get(spec.name, Demand()),
        view.memory.outlooks.get(spec.name, Outlook()),
        view.rules,
        view.timings.get(spec.name, Timing()),
        dt=max(0.0, view.now - known.at) if known and not math.isinf(known.at) else 0.0,
        boot_s=0.0 if has_seat(spec, free) else again,
        reboot_s=again,
        price_per_h=price_per_h(view, spec.gpu),
    )
    return replace(at, coming=tuple(coming(view, at))) if at.demand.queued else at


def coming(view: View, at: Situation) -> list[float]:
    """Seconds until each starting replica is ready; those without a host get the hosts that booted longest so far."""
    mine = (r for r in view.placed if r.function == at.spec.name and r.version == at.spec.version)
    loading = [r for r in mine if r.starting and not r.draining]
    found = [max(0.0, at.load_s - (at.now - view.memory.loading.get(r.id, at.now))) for r in loading]
    booting = sorted(view.memory.pending.values())[: at.outlook.awaited]
    found += [at.load_s + max(0.0, at.reboot_s - (at.now - since)) for since in booting]
    return found + [at.load_s + at.reboot_s] * (at.outlook.awaited - len(booting))


def left(fleet: Fleet, going: list[Machine]) -> int:
    return sum(machine.pool == fleet.pool.name for machine in going)


def actions(
    view: View,
    plans: Mapping[str, Plan],
    add: tuple[tuple[str, str, str], ...],
    ordered: list[Fleet],
    going: list[Machine],
) -> list[str]:
    """One sentence for each change."""
    flagged = {replica.id for replica in view.placed if replica.draining}
    kept = {replica.id for each in plans.values() for replica in each.keep}
    kept |= {replica.id for replica in view.placed if replica.function in view.held}
    said = [f"start a replica of {name} on {host} ({device})" for name, host, device in add]
    said += [f"drain {id}" for each in plans.values() for id in each.drain if id not in flagged]
    said += [f"drop {replica.id} ({replica.state})" for replica in view.placed if replica.id not in kept]
    said += [f"ask pool {f.pool.name} for {f.new} more, {f.count} in all" for f in ordered if f.new]
    empty = view.memory.empty
    return said + [f"give back {m.id}, empty for {seconds(view.now - empty.get(m.id, view.now))}" for m in going]


def remember_failures(view: View) -> dict[str, Failures]:
    """Counts replicas that are newly reported as failed; one of the same version that is ready clears the count, and so
    does one that was until it failed: its start is no trouble, and its jobs' attempts are bounded."""
    memory = {name: known for name, known in view.failures.items() if name in view.specs}
    for replica in view.placed:
        spec = view.specs.get(replica.function)
        if spec is None or replica.version != spec.version:
            continue
        known = memory.get(replica.function, Failures(spec.version))
        known = known if known.version == spec.version else Failures(spec.version)
        if replica.state == "failed":
            counted = count_crash(known, view.now) if replica.proves else count_failure(known, view.now)
            memory[replica.function] = replace(counted, error=replica.error)
        elif replica.proves and known.count and view.now >= known.retry_at:
            memory[replica.function] = Failures(spec.version)
    return memory


def count_crash(known: Failures, now: float) -> Failures:
    """The first crash is followed by a start at once, those soon behind it after 0.5, 1 and then always 2 s: a process
    that dies by itself must not keep the host busy, nor one bad job in a hundred keep the others waiting."""
    crashes = known.crashes + 1 if now - known.crashed_at <= CRASHES_FORGOTTEN_S else 1
    pause = min(MAX_CRASH_PAUSE_S, pause_after(crashes))
    return Failures(known.version, retry_at=now + pause, crashes=crashes, crashed_at=now)


def count_failure(known: Failures, now: float) -> Failures:
    """The first failure is retried at once, the next ones after 0.5 s, 1 s, ... up to a minute."""
    pause = min(MAX_BACKOFF_S, pause_after(known.count + 1))
    return replace(known, count=known.count + 1, retry_at=now + pause)


def pause_after(count: int) -> float:
    return 0.0 if count == 1 else FIRST_BACKOFF_S * 2.0 ** min(count - 2, 16)
