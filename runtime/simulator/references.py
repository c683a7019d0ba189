"""Reference policies to compare with, written anew from their public documentation. Each wants a number of replicas per
function; hosts are the best case for all of them: asked for at once, given back the moment they are empty.

Knative KPA: knative.dev/docs/serving/autoscaling (kpa-specific, concurrency, scale-to-zero). KEDA: keda.sh/docs, the
ScaledObject specification, with the Horizontal Pod Autoscaler's stabilisation window (kubernetes.io/docs). Step
scaling: docs.aws.amazon.com/autoscaling/ec2/userguide, as-scaling-simple-step. Idle timeout: Modal's
`scaledown_window` (modal.com/docs/guide/scale), RunPod's idle timeout and request count (github.com/runpod/docs).
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from stoker.runtime.controller.policy_hosts import empty_since, order, place, retired
from stoker.runtime.controller.policy_memory import capacity
from stoker.runtime.controller.policy_state import Decision, Placed, Rules, View
from stoker.runtime.spec import FunctionSpec


@dataclass(frozen=True, slots=True)
class Seen:
    """What a reference policy may know of a function at a tick."""

    now: float
    spec: FunctionSpec
    queued: int
    running: int
    ready: int
    current: int
    idle: Mapping[str, float]

    @property
    def jobs(self) -> int:
        return self.queued + self.running

    @property
    def room(self) -> int:
        return capacity(self.spec)


class Target(Protocol):
    """The wanted number of replicas of one function; keeps its own memory."""

    def __call__(self, seen: Seen) -> int: ...


class Window:
    """The mean over the last `length_s` of a value that is sampled at uneven times and held until the next sample."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._samples: deque[tuple[float, float, float]] = deque()
        self._at = -math.inf
        self._area = self._span = 0.0

    def add(self, now: float, value: float) -> float:
        span = min(now - self._at, self._length_s) if self._samples else 1.0
        self._samples.append((now, value, span))
        self._area, self._span, self._at = self._area + value * span, self._span + span, now
        while self._samples[0][0] <= now - self._length_s:
            _, old, held = self._samples.popleft()
            self._area, self._span = self._area - old * held, self._span - held
        return self._area / self._span


@dataclass
class Kpa:
    """Knative's pod autoscaler on concurrency: `target` of what a replica runs at once (its default: 70 %), averaged
    over 60 s; in panic, when 6 s ask for twice what is ready, over 6 s and never down; at most half goes at a time;
    to zero after a window without any, and a grace period."""

    target: float = 0.7
    stable_s: float = 60.0
    panic_s: float = 6.0
    threshold: float = 2.0
    down_rate: float = 2.0
    grace_s: float = 30.0

    def __post_init__(self) -> None:
        self._stable, self._panic = Window(self.stable_s), Window(self.panic_s)
        self._panics_since: float | None = None
        self._most = 0
        self._zero_since: float | None = None

    def __call__(self, seen: Seen) -> int:
        goal = self.target * seen.room
        wants = math.ceil(round(self._stable.add(seen.now, seen.jobs) / goal, 9))
        panics = math.ceil(round(self._panic.add(seen.now, seen.jobs) / goal, 9))
        if seen.ready:
            wants = max(wants, math.floor(seen.ready / self.down_rate))
        if panics >= self.threshold * max(1, seen.ready):
            self._most = panics if self._panics_since is None else self._most
            self._panics_since = seen.now
        elif self._panics_since is not None and seen.now > self._panics_since + self.stable_s:
            self._panics_since = None
        if self._panics_since is not None:
            self._most = wants = max(wants, panics, self._most)
        return self._to_zero(seen, wants)

    def _to_zero(self, seen: Seen, wants: int) -> int:
        if wants or seen.jobs:
            self._zero_since = None
            return max(wants, 1 if seen.jobs else 0)
        self._zero_since = seen.now if self._zero_since is None else self._zero_since
        return 0 if seen.now >= self._zero_since + self.grace_s else min(1, seen.current)


@dataclass
class Keda:
    """Jobs (queued and running) over `target` of a replica's room, looked at every 30 s; down only to the highest
    wish of the last 300 s, to zero 300 s after the last work."""

    target: float = 1.0
    poll_s: float = 30.0
    cooldown_s: float = 300.0

    def __post_init__(self) -> None:
        self._next = 0.0
        self._wish = 0
        self._wishes: deque[tuple[float, int]] = deque()
        self._worked = -math.inf

    def __call__(self, seen: Seen) -> int:
        if seen.now < self._next:
            return self._wish
        self._next = seen.now + self.poll_s
        self._worked = seen.now if seen.jobs else self._worked
        self._wishes.append((seen.now, math.ceil(seen.jobs / (self.target * seen.room))))
        while self._wishes[0][0] <= seen.now - self.cooldown_s:
            self._wishes.popleft()
        idle = seen.now - self._worked >= self.cooldown_s
        self._wish = 0 if idle else max(1, *(count for _, count in self._wishes), 0)
        return self._wish


@dataclass
class Steps:
    """Step scaling on the mean backlog per minute: one more replica above `high` queued jobs per replica, three more
    above three times that, one less when all jobs would fit one replica fewer at `low` use; `cooldown_s` between."""

    high: float = 1.0
    low: float = 0.6
    period_s: float = 60.0
    cooldown_s: float = 180.0

    def __post_init__(self) -> None:
        self._queued, self._jobs = Window(self.period_s), Window(self.period_s)
        self._next, self._down_after, self._count = 0.0, 0.0, 0

    def __call__(self, seen: Seen) -> int:
        queued, jobs = self._queued.add(seen.now, seen.queued), self._jobs.add(seen.now, seen.jobs)
        if self._count == 0 and seen.jobs:
            self._count, self._next, self._down_after = 1, seen.now + self.period_s, seen.now + self.cooldown_s
        if seen.now < self._next:
            return self._count
        self._next = seen.now + self.period_s
        backlog = queued / max(1, self._count)
        if backlog > self.high:
            self._count += 3 if backlog > 3 * self.high else 1
            self._down_after = seen.now + self.cooldown_s
        elif seen.now >= self._down_after and jobs <= self.low * seen.room * (self._count - 1):
            self._count = max(0, self._count - 1)
            self._down_after = seen.now + self.cooldown_s
        self._count = min(self._count, seen.spec.scaling.max_replicas)
        return self._count


@dataclass
class Fixed:
    """Always `count`."""

    count: int = 1

    def __call__(self, seen: Seen) -> int:
        return self.count


@dataclass
class IdleTimeout:
    """A replica for every `target` of a replica's room in jobs, at once; each goes after `window_s` without work."""

    window_s: float = 60.0
    target: float = 1.0

    def __call__(self, seen: Seen) -> int:
        wants = math.ceil(seen.jobs / (self.target * seen.room))
        stay = sum(seen.now - since < self.window_s for since in seen.idle.values())
        return max(wants, seen.current - len(seen.idle) + stay)


@dataclass
class Reference:
    """A scaler that follows a `Target` for each function: makes hosts and replicas of its wishes."""

    make: type[Target] | None = None
    options: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._targets: dict[str, Target] = {}
        self._idle: dict[str, float] = {}

    def __call__(self, view: View) -> Decision:
        view = replace(view, rules=Rules(host_idle_s=0.0))
        idle = [r for r in view.placed if r.state == "ready" and not r.inflight and not r.draining]
        self._idle = {replica.id: self._idle.get(replica.id, view.now) for replica in idle}
        keep: list[Placed] = []
        drain: list[str] = []
        missing: list[str] = []
        for name, spec in view.specs.items():
            kept, ending, more = self._function(view, name, spec)
            keep += kept + ending
            drain += [replica.id for replica in ending]
            missing += [name] * more
        add, unplaced = place(view, keep, missing)
        ordered, _ = order(view, unplaced)
        empty = empty_since(view, {r.host for r in keep} | {host for _, host, _ in add})
        going = retired(view, ordered, empty)
        hosts = {f.pool.name: f.count - sum(m.pool == f.pool.name for m in going) for f in ordered}
        memory = replace(view.memory, empty=empty)
        retire = tuple(machine.id for machine in going)
        return Decision(tuple(keep), add, {}, tuple(drain), hosts, retire, memory=memory)

    def _function(self, view: View, name: str, spec: FunctionSpec) -> tuple[list[Placed], list[Placed], int]:
        good = {machine.id for machine in view.machines if machine.good}
        mine = [r for r in view.placed if r.function == name and r.state not in ("gone", "failed")]
        serving = [r for r in mine if not r.draining and r.host in good]
        ready = sum(replica.state == "ready" for replica in serving)
        idle = {r.id: self._idle[r.id] for r in serving if r.id in self._idle}
        demand = view.demands[name]
        seen = Seen(view.now, spec, demand.queued, demand.running, ready, len(serving), idle)
        if name not in self._targets:
            assert self.make is not None
            self._targets[name] = self.make(**self.options)
        wants = min(spec.scaling.max_replicas, max(spec.scaling.min_replicas, self._targets[name](seen)))
        stay = sorted(serving, key=lambda r: (r.state != "ready", -r.inflight))[:wants]
        staying = {replica.id for replica in stay}
        left = [r for r in mine if r.id not in staying]
        ending = [r for r in left if r.inflight or (r.state == "ready" and not r.draining)]
        return stay, ending, max(0, wants - len(stay))
