"""Which version serves while a function's newest one fails to start, and when that is tried again: pure functions.

The last version that was ready is proven. It is woken in place of one that failed and never was, and scaled as if it
were the newest; beside it the newest is tried again, one replica at a time, until one is ready and takes over.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stoker.runtime.controller.policy_replicas import Plan, Situation, plan
from stoker.runtime.controller.policy_state import Demand, Failures, Placed, View
from stoker.runtime.spec import FunctionSpec

TRIAL = " (new)"
# So long after it was asked for, a function's start is tried, should there be no place for it at first.
ASKED_S = 60.0


@dataclass(frozen=True, slots=True)
class Trial:
    """The newest version of a function that another one serves for, and when it may be tried again."""

    spec: FunctionSpec
    retry_at: float

    def is_due(self, now: float, served: Plan) -> bool:
        """Only while the function is awake."""
        return served.count.wanted > 0 and now >= self.retry_at


@dataclass(frozen=True, slots=True)
class Rollout:
    """A version that fails to start, the one that serves meanwhile ("": none), and the last failure."""

    version: str
    serving: str
    error: str


def remember_proven(view: View) -> dict[str, FunctionSpec]:
    """The last version of each function that was ready; what was deleted, or made anew since, has none."""
    known = {name: spec for name, spec in view.proven.items() if name in view.specs}
    proven = {name: spec for name, spec in known.items() if spec.born == view.specs[name].born}
    for replica in view.placed:
        spec = view.specs.get(replica.function)
        if spec and replica.proves and (replica.version, replica.born) == (spec.version, spec.born):
            proven[replica.function] = spec
    return proven


def with_starts_asked(view: View, asked: Mapping[str, float]) -> View:
    """`asked`: by function, seconds since someone wanted to know whether it starts. One that nobody knows to start or,
    since then, to fail is started as if a job waited for it; from then on it goes by its idle timeout."""
    demands, failures = dict(view.demands), dict(view.failures)
    for name, ago_s in asked.items():
        spec, demand = view.specs.get(name), demands.get(name, Demand())
        if spec is None or spec.kind == "router":
            continue
        if name in failures and failures[name].retry_at <= view.now - ago_s:
            del failures[name]
        waits = ago_s < ASKED_S and is_untried(replace(view, failures=failures), spec)
        demands[name] = replace(demand, queued=demand.queued + waits, idle_s=min(demand.idle_s, ago_s))
    return replace(view, demands=demands, failures=failures)


def is_untried(view: View, spec: FunctionSpec) -> bool:
    """Neither ready nor failed so far."""
    proven = view.proven.get(spec.name)
    if proven and (proven.version, proven.born) == (spec.version, spec.born):
        return False
    mine = (r for r in view.placed if (r.function, r.version) == (spec.name, spec.version))
    return not failed_starts(spec, view.failures).count and not any(r.state == "failed" for r in mine)


def failed_starts(spec: FunctionSpec, failures: Mapping[str, Failures]) -> Failures:
    """Of this version."""
    known = failures.get(spec.name, Failures())
    return known if known.version == spec.version else Failures(spec.version)


def fallbacks(view: View, failures: Mapping[str, Failures]) -> dict[str, FunctionSpec]:
    """By function, the proven version that serves because the newest one fails to start."""
    found = {}
    for name, proven in view.proven.items():
        newest = view.specs.get(name)
        if newest and newest.version != proven.version and failed_starts(newest, failures).count:
            found[name] = proven
    return found


def on_trial(newest: FunctionSpec, placed: Iterable[Placed], hosts: Iterable[str]) -> tuple[Placed, ...]:
    """Replicas of a newest version that another serves for, as long as their start may succeed."""
    usable = set(hosts)
    return tuple(
        r
        for r in placed
        if (r.version, r.born) == (newest.version, newest.born)
        and r.state not in ("failed", "gone", "draining")
        and not r.draining
        and r.host in usable
    )


def plan_beside(
    trying: tuple[Placed, ...], at: Situation, placed: tuple[Placed, ...], prices: Mapping[str, float], failed: Failures
) -> Plan:
    """The plan of the version that serves, made without those on trial, which stay."""
    if not trying:
        return plan(at, placed, prices, failed)
    served = plan(at, tuple(r for r in placed if r not in trying), prices, failed)
    return replace(served, keep=(*served.keep, *trying))


def trial_name(function: str) -> str:
    """Under which a trial is given a place: no function can have it."""
    return function + TRIAL


def rollouts(view: View, failures: Mapping[str, Failures], served: Mapping[str, FunctionSpec]) -> dict[str, Rollout]:
    """The functions whose newest version fails to start and never was ready."""
    found = {}
    for name, newest in view.specs.items():
        failed, proven = failed_starts(newest, failures), view.proven.get(name)
        if failed.count and (proven is None or proven.version != newest.version):
            serving = served[name].version if name in served else awake(view, newest)
            found[name] = Rollout(newest.version, serving, message_of(failed.error))
    return found


def awake(view: View, newest: FunctionSpec) -> str:
    """An older version that happens to be awake still."""
    mine = (r for r in view.placed if r.function == newest.name and r.born == newest.born)
    return next((r.version for r in mine if r.state == "ready" and r.version != newest.version), "")


def message_of(error: Mapping[str, Any] | None) -> str:
    return str((error or {}).get("message") or (error or {}).get("type") or "no reason reported")


def told(name: str, rollout: Rollout) -> str:
    serves = f"version {rollout.serving} serves" if rollout.serving else "no other version serves"
    return f"{name}: version {rollout.version} does not start: {rollout.error}; {serves}"
