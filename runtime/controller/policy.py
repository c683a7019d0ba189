"""How many replicas each function should have, where, and how many hosts there should be: pure functions of one view.

Scale out on work that waits; scale in only after `idle_timeout_s` with an empty queue, no lease and nothing starting.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stoker.runtime.spec import FunctionSpec

MAX_BACKOFF_S = 30.0
FIRST_BACKOFF_S = 0.5

Wanted = dict[str, dict[str, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Demand:
    """One function's queue as the server reports it; `idle_s` is the time since anything happened in it."""

    queued: int = 0
    running: int = 0
    delayed: int = 0
    idle_s: float = math.inf

    @property
    def work(self) -> int:
        return self.queued + self.running + self.delayed


@dataclass(frozen=True, slots=True)
class Placed:
    """A replica as its host reports it ("unseen" until the host does)."""

    id: str
    function: str
    version: str
    host: str
    device: str
    state: str
    error: Mapping[str, Any] | None = None
    born: str = ""


@dataclass(frozen=True, slots=True)
class Failures:
    """Consecutive failed starts of a function's version, the last one's error, and when it may be tried again
    (controller's clock, s)."""

    version: str = ""
    count: int = 0
    retry_at: float = 0.0
    error: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class View:
    """Everything a decision depends on. `hosts` maps live host ids to their devices; `now` is in seconds."""

    now: float
    specs: Mapping[str, FunctionSpec]
    demands: Mapping[str, Demand]
    hosts: Mapping[str, list[str]]
    placed: tuple[Placed, ...] = ()
    failures: Mapping[str, Failures] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """Replicas to keep, replicas to add (function, host, device), and the failure memory for the next decision."""

    keep: tuple[Placed, ...]
    add: tuple[tuple[str, str, str], ...]
    failures: Mapping[str, Failures]


def wanted_replicas(spec: FunctionSpec, demand: Demand, current: int, starting: int) -> int:
    """The number of replicas of one function. Never below min or above max; never fewer while there is work."""
    bounds = spec.scaling
    needed = math.ceil((demand.queued + demand.running) / (bounds.target_queue or capacity(spec)))
    if demand.work or starting:
        return min(bounds.max_replicas, max(bounds.min_replicas, current, needed, 1 if demand.work else 0))
    if demand.idle_s >= bounds.idle_timeout_s:
        return bounds.min_replicas
    return min(bounds.max_replicas, max(bounds.min_replicas, current))


def capacity(spec: FunctionSpec) -> int:
    """Jobs that one replica runs at once."""
    if spec.kind != "python":
        return spec.model.max_seqs
    return spec.concurrency * (spec.batch.max_size if spec.batch else 1)


def decide(view: View) -> Decision:
    failures = remember_failures(view)
    keep: list[Placed] = []
    missing: list[str] = []
    for name, spec in view.specs.items():
        kept, count = decide_function(view, spec, failures.get(name, Failures()))
        keep += kept
        missing += [name] * count
    return Decision(tuple(keep), place(view, keep, missing), failures)


def decide_function(view: View, spec: FunctionSpec, failed: Failures) -> tuple[list[Placed], int]:
    """The function's replicas to keep and how many more it should get now."""
    live = [
        replica
        for replica in view.placed
        if replica.function == spec.name and replica.host in view.hosts and replica.state not in ("failed", "gone")
    ]
    current = [replica for replica in live if replica.version == spec.version]
    # An older version helps out; one of a function that was deleted in between, and made anew, must not.
    outdated = [replica for replica in live if replica.version != spec.version and replica.born == spec.born]
    starting = sum(replica.state in ("unseen", "starting", "loading") for replica in current)
    awake = max(len(current), len(outdated))
    wanted = wanted_replicas(spec, view.demands.get(spec.name, Demand()), awake, starting)
    keep = sorted(current, key=lambda replica: replica.state != "ready")[:wanted]
    missing = max(0, wanted - len(keep))
    if missing and failed.version == spec.version and view.now < failed.retry_at:
        missing = 0
    ready = any(replica.state == "ready" for replica in keep)
    return keep + ([] if ready or not wanted else outdated), missing


def place(view: View, keep: list[Placed], functions: list[str]) -> tuple[tuple[str, str, str], ...]:
    """The device with the fewest replicas gets the next one; a function that needs a GPU gets one or nothing."""
    load = {(host, device): 0 for host, devices in sorted(view.hosts.items()) for device in devices}
    for replica in keep:
        if (replica.host, replica.device) in load:
            load[replica.host, replica.device] += 1
    placed = []
    for name in functions:
        fitting = [spot for spot in load if fits(view.specs[name], spot[1])]
        if fitting:
            spot = min(fitting, key=lambda spot: load[spot])
            load[spot] += 1
            placed.append((name, *spot))
    return tuple(placed)


def fits(spec: FunctionSpec, device: str) -> bool:
    return not spec.gpu or device != "cpu"


def remember_failures(view: View) -> dict[str, Failures]:
    """Counts replicas that are newly reported as failed; a ready one of the same version clears the count."""
    memory = {name: known for name, known in view.failures.items() if name in view.specs}
    for replica in view.placed:
        spec = view.specs.get(replica.function)
        if spec is None or replica.version != spec.version:
            continue
        known = memory.get(replica.function, Failures(spec.version))
        known = known if known.version == spec.version else Failures(spec.version)
        if replica.state == "failed":
            memory[replica.function] = replace(count_failure(known, view.now), error=replica.error)
        elif replica.state == "ready" and known.count and view.now >= known.retry_at:
            memory[replica.function] = Failures(spec.version)
    return memory


def count_failure(known: Failures, now: float) -> Failures:
    """The first failure is retried at once, the next ones after 0.5 s, 1 s, ... up to a minute."""
    pause = 0.0 if known.count == 0 else min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (known.count - 1))
    return replace(known, count=known.count + 1, retry_at=now + pause)
