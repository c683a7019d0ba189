"""Why a function's jobs wait, in words for people: a pure function of a view and what was decided on it."""

from collections.abc import Iterable
from dataclasses import dataclass

from stoker.runtime.controller.policy_hosts import Fleet, boot_s, seconds
from stoker.runtime.controller.policy_memory import pool_fits
from stoker.runtime.controller.policy_replicas import Plan, Situation
from stoker.runtime.controller.policy_state import Failures, Reason, View


@dataclass(frozen=True, slots=True)
class Case:
    """One function with waiting jobs: its plan, its replicas without a place, and its failed starts."""

    at: Situation
    plan: Plan
    unplaced: int
    failed: Failures


def explain(view: View, case: Case, ordered: Iterable[Fleet]) -> Reason:
    now, spec, kept = view.now, case.at.spec, case.plan.keep
    ready = [r for r in kept if r.state == "ready" and r.id not in case.plan.drain]
    if case.failed.version == spec.version and now < case.failed.retry_at and not ready:
        left = case.failed.retry_at - now
        return Reason("start_failed", f"its replicas failed to start {case.failed.count} times", left)
    starting = [r for r in kept if r.starting]
    if case.unplaced and not starting:
        return explain_hosts(view, case, list(ordered))
    if starting or not ready:
        began = [view.memory.loading[r.id] for r in starting if r.id in view.memory.loading]
        left = max(0.0, case.at.load_s - (now - min(began, default=now)))
        return Reason("loading", f"a replica is starting, about {seconds(left)} left", left)
    if len(ready) >= spec.scaling.max_replicas:
        return Reason("max_replicas", f"all {len(ready)} replicas are busy and max_replicas is {len(ready)}")
    return Reason("busy", f"all {len(ready)} replicas are busy; their queue ends before another could be ready")


def explain_hosts(view: View, case: Case, ordered: list[Fleet]) -> Reason:
    gpu = case.at.spec.gpu
    fitting = [fleet for fleet in ordered if pool_fits(gpu, fleet.pool.gpu, fleet.pool.devices)]
    if not fitting:
        wanted = f"a GPU ({gpu})" if gpu else "room"
        return Reason("no_fitting_pool", f"no host has {wanted} and no pool could start one; add a pool or a host")
    booting = [fleet for fleet in fitting if fleet.count and fleet.seats >= 0 and booting_hosts(view, fleet)]
    if booting:
        since = [view.memory.pending[m.id] for m in view.machines if m.id in view.memory.pending]
        left = max(0.0, boot_s(view, gpu) - (view.now - min(since, default=view.now))) + case.at.load_s
        return Reason("host_booting", f"a host of pool {booting[0].pool.name} is booting", left)
    blocked = [fleet for fleet in fitting if fleet.blocked]
    if blocked:
        pool = min(blocked, key=lambda fleet: fleet.pool.retry_at).pool
        left = pool.retry_at - view.now
        return Reason("no_capacity", f"pool {pool.name}: {pool.error}; next try in {seconds(left)}", left)
    names = ", ".join(f"{fleet.pool.name} ({fleet.pool.max_hosts})" for fleet in fitting)
    return Reason("max_hosts", f"its pools are at their most hosts: {names}; raise max_hosts")


def booting_hosts(view: View, fleet: Fleet) -> int:
    listed = sum(m.pool == fleet.pool.name and m.good and m.id not in view.hosts for m in view.machines)
    return listed + fleet.coming + fleet.new
