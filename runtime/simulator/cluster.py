"""The simulated side of a decision: hosts that boot, cost money, are refused and taken away; replicas that load."""

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from stoker.runtime.controller.policy_state import Machine, Placed, Pool, Rules
from stoker.runtime.simulator.measured import ASSUMED, MEASURED, Engine, Starts
from stoker.runtime.simulator.replicas import Batch, Replica, Slots
from stoker.runtime.spec import FunctionSpec

NOTICE_S = 120.0
REFUSED_S = 60.0


@dataclass(frozen=True, slots=True)
class Faults:
    """`interruptions_per_h`: how often a spot host is taken away, with two minutes' notice. `refusals`: (pool, from,
    until) in seconds: no new host there meanwhile."""

    interruptions_per_h: float = 0.0
    refusals: tuple[tuple[str, float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated besides the trace; everything random follows from `seed`. Cost counts from `settle_s` on."""

    specs: Mapping[str, FunctionSpec]
    pools: tuple[Pool, ...]
    engine: Engine = MEASURED
    starts: Mapping[str, Starts] = field(default_factory=dict)
    rules: Rules = field(default_factory=Rules)
    faults: Faults = field(default_factory=Faults)
    tick_s: float = 1.0
    settle_s: float = 0.0
    seed: int = 0

    def starts_of(self, function: str) -> Starts:
        return self.starts.get(function, ASSUMED)


@dataclass(eq=False)
class SimHost:
    id: str
    pool: Pool
    launched: float
    state: str = "pending"
    since: float = 0.0
    weights: set[str] = field(default_factory=set)
    replicas: list["SimReplica"] = field(default_factory=list)

    _machine: Machine | None = None

    def machine(self) -> Machine:
        """The same record for as long as nothing changes."""
        if self._machine is None or self._machine.state != self.state:
            self._machine = Machine(self.id, self.pool.name, self.state, self.since)  # type: ignore[arg-type]
        return self._machine


@dataclass(eq=False)
class SimReplica:
    id: str
    function: str
    version: str
    host: SimHost
    device: str
    work: Replica
    state: str = "loading"
    draining: bool = False
    turn: int = 0
    _placed: Placed | None = None

    def placed(self) -> Placed:
        """The same record for as long as nothing changes."""
        jobs, seen = len(self.work.jobs), self._placed
        if seen and seen.inflight == jobs and seen.state == self.state and seen.draining == self.draining:
            return seen
        self._placed = Placed(
            self.id, self.function, self.version, self.host.id, self.device, self.state, None, "", jobs, self.draining
        )
        return self._placed


class SimCluster:
    """Hosts and replicas, and the events that they have coming: (time, number, kind, host or replica, turn)."""

    def __init__(self, setup: Setup, horizon_s: float) -> None:
        self._setup = setup
        self._horizon_s = horizon_s
        self._chance = random.Random(f"cluster {setup.seed}")
        self._numbers = itertools.count()
        self._names = itertools.count()
        self.events: list[tuple[float, int, str, SimHost | SimReplica, int]] = []
        self.hosts: dict[str, SimHost] = {}
        self.refused: dict[str, float] = {}
        self.cost_usd = 0.0
        self.launches = 0

    def later(self, time: float, kind: str, target: SimHost | SimReplica, turn: int = 0) -> None:
        heapq.heappush(self.events, (time, next(self._numbers), kind, target, turn))

    def pools(self, now: float) -> tuple[Pool, ...]:
        """As the provider would report them."""
        good = Counter(host.pool.name for host in self.hosts.values() if host.state in ("pending", "ready"))
        return tuple(self._reported(pool, now, good[pool.name]) for pool in self._setup.pools)

    def launch(self, now: float, pool: Pool) -> None:
        """A new host, or a refusal that counts for a while."""
        if any(name == pool.name and start <= now < end for name, start, end in self._setup.faults.refusals):
            self.refused[pool.name] = now + REFUSED_S
            return
        host = SimHost(f"{pool.name}-{next(self._names)}", pool, now, since=now)
        self.hosts[host.id] = host
        self.launches += 1
        self.later(now + pool.boot_s * self._spread(ASSUMED.spread), "booted", host)
        if pool.spot and self._setup.faults.interruptions_per_h:
            lives_s = self._chance.expovariate(self._setup.faults.interruptions_per_h / 3600)
            self.later(now + lives_s, "interrupted", host)

    def terminate(self, now: float, host: SimHost) -> None:
        if self.hosts.pop(host.id, None):
            used = max(0.0, min(now, self._horizon_s) - max(host.launched, self._setup.settle_s))
            self.cost_usd += used / 3600 * host.pool.price_per_h

    def start(self, now: float, spec: FunctionSpec, host: SimHost, device: str) -> SimReplica:
        batch = spec.kind != "python"
        work = Batch(spec.model.max_seqs, self._setup.engine) if batch else Slots(spec.concurrency)
        replica = SimReplica(f"{spec.name}-{next(self._names)}", spec.name, spec.version, host, device, work)
        host.replicas.append(replica)
        starts = self._setup.starts_of(spec.name)
        load_s = starts.warm_s if spec.name in host.weights else starts.cold_s
        self.later(now + load_s * self._spread(starts.spread), "loaded", replica)
        return replica

    def _spread(self, sigma: float) -> float:
        return math.exp(self._chance.gauss(0, sigma))

    def _reported(self, pool: Pool, now: float, good: int) -> Pool:
        retry_at = self.refused.get(pool.name, 0.0)
        error = "insufficient capacity" if retry_at > now else ""
        return Pool(
            pool.name,
            pool.price_per_h,
            pool.spot,
            pool.devices,
            pool.gpu,
            pool.slots,
            pool.min_hosts,
            pool.max_hosts,
            pool.boot_s,
            good,
            retry_at,
            error,
        )
