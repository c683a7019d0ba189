"""What a scaling decision depends on and what it says: plain records, no behaviour. All times are seconds on the clock
that the caller passes as `View.now`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stoker.runtime.spec import FunctionSpec

MachineState = Literal["pending", "ready", "interrupted", "retiring", "failed"]
STARTING = ("unseen", "starting", "loading")


@dataclass(frozen=True, slots=True)
class Demand:
    """One function's queue as the server reports it; `idle_s` is the time since anything happened in it, the rates
    are its moving averages over `RATE_WINDOW_S`."""

    queued: int = 0
    running: int = 0
    delayed: int = 0
    idle_s: float = math.inf
    oldest_s: float = 0.0
    arrived_per_s: float = 0.0
    drained_per_s: float = 0.0

    @property
    def work(self) -> int:
        return self.queued + self.running + self.delayed


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one function that are known from elsewhere; 0: the policy uses what it has seen itself."""

    load_s: float = 0.0
    service_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Placed:
    """A replica as its host reports it ("unseen" until the host does). `draining`: it was told to take no new work;
    `settled`: nothing of its start can fail any more once it is ready; `was_ready`, whatever it is now."""

    id: str
    function: str
    version: str
    host: str
    device: str
    state: str
    error: Mapping[str, Any] | None = None
    born: str = ""
    inflight: int = 0
    draining: bool = False
    settled: bool = True
    was_ready: bool = False

    @property
    def starting(self) -> bool:
        return self.state in STARTING

    @property
    def serves(self) -> bool:
        return self.state == "ready" and self.settled

    @property
    def proves(self) -> bool:
        """That its version can start."""
        return self.serves or (self.was_ready and self.settled)


@dataclass(frozen=True, slots=True)
class Pool:
    """Hosts of one kind that can be asked for. `asked` counts the good ones asked for so far (listed or still to come);
    `retry_at` and `error` tell of the last refusal. A host offers `slots` replicas on each of its `devices`."""

    name: str
    price_per_h: float = 0.0
    spot: bool = False
    devices: tuple[str, ...] = ("cuda:0",)
    gpu: str = ""
    slots: int = 1
    min_hosts: int = 0
    max_hosts: int = 1
    boot_s: float = 120.0
    asked: int = 0
    retry_at: float = 0.0
    error: str = ""

    @property
    def room(self) -> int:
        """Replicas that one host takes."""
        return len(self.devices) * self.slots

    @property
    def replica_price_per_h(self) -> float:
        return self.price_per_h / self.room


@dataclass(frozen=True, slots=True)
class Machine:
    """A host as its provider lists it, in `state` since `since`. Hosts that no provider lists are never touched."""

    id: str
    pool: str
    state: MachineState
    since: float = 0.0

    @property
    def good(self) -> bool:
        return self.state in ("pending", "ready")


@dataclass(frozen=True, slots=True)
class Failures:
    """Consecutive failed starts of a function's version, the last one's error, and when it may be tried again
    (controller's clock, s). `crashes` of replicas that had been ready came soon behind each other, the last one
    `crashed_at`."""

    version: str = ""
    count: int = 0
    retry_at: float = 0.0
    error: Mapping[str, Any] | None = None
    crashes: int = 0
    crashed_at: float = 0.0


# Not frozen only because one is made anew at every decision, and making a frozen one takes three times as long.
@dataclass(slots=True)
class Outlook:
    """What is remembered of one function between decisions. Arrivals per second are over about 20 s (`fast`), a minute
    (`steady`) and five (`slow`), as the queue `told` last; `woke` is when they began after a pause, `surged` since when
    the fast average is far above the steady one, and `peak` the most it then was. `busy_s` and `done`
    are seconds of running and jobs done lately, `service_s` what they say of one job, `full_s` the same while all
    `seats` were taken, as they are for `crowded_s` now. `came` is when work came last, `gaps` are the last times
    between work and new work, `crests` the replicas that the work then took. `highs` are the falling maxima of the
    recent needs with the time until which they hold; `awaited` counts replicas whose host boots."""

    at: float = -math.inf
    fast: float = 0.0
    steady: float = 0.0
    slow: float = 0.0
    woke: float = -math.inf
    surged: float = math.inf
    peak: float = 0.0
    drain_woke: float = -math.inf
    busy_s: float = 0.0
    done: float = 0.0
    service_s: float = 0.0
    full_s: float = 0.0
    crowded_s: float = 0.0
    seats: int = 0
    told: float = 0.0
    came: float = -math.inf
    idle: bool = True
    gaps: tuple[float, ...] = ()
    crests: tuple[int, ...] = ()
    crest: int = 0
    highs: tuple[tuple[float, int], ...] = ()
    loads: tuple[float, ...] = ()
    awaited: int = 0
    credit_usd: float = 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Carried from one decision to the next; an empty one only means that everything is learned anew. `loading` and
    `empty` map a replica that starts and a host without replicas to since when; `boots` are start times by pool."""

    outlooks: Mapping[str, Outlook] = field(default_factory=dict)
    loading: Mapping[str, float] = field(default_factory=dict)
    empty: Mapping[str, float] = field(default_factory=dict)
    pending: Mapping[str, float] = field(default_factory=dict)
    boots: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rules:
    """`attainment`: the share of requests that should start within the function's SLO (`ttft_s` where it has none), and
    beyond which no replica is added. `cold_weight`: one second of cold start is worth that many seconds of an idle
    replica, and a missed SLO as much as a cold start. `prewarm_usd_per_h` bounds,
    for each function, what replicas may cost that only a forecast asked for."""

    attainment: float = 0.998
    ttft_s: float = 1.0
    cold_weight: float = 5.0
    prewarm_usd_per_h: float = 0.5
    host_idle_s: float = 30.0


@dataclass(frozen=True, slots=True)
class View:
    """Everything a decision depends on. `hosts` maps live host ids to their devices; `now` is in seconds. `proven`: the
    version of each function that was ready last; `proven_failures`: its own failed starts while it serves for a newer
    one. `held`: functions without a spec here whose replicas stay as they are."""

    now: float
    specs: Mapping[str, FunctionSpec]
    demands: Mapping[str, Demand]
    hosts: Mapping[str, list[str]]
    placed: tuple[Placed, ...] = ()
    failures: Mapping[str, Failures] = field(default_factory=dict)
    timings: Mapping[str, Timing] = field(default_factory=dict)
    pools: tuple[Pool, ...] = ()
    machines: tuple[Machine, ...] = ()
    memory: Memory = field(default_factory=Memory)
    rules: Rules = field(default_factory=Rules)
    proven: Mapping[str, FunctionSpec] = field(default_factory=dict)
    proven_failures: Mapping[str, Failures] = field(default_factory=dict)
    held: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a function's jobs wait: a stable code, a sentence, and about how many seconds more (None: unknown)."""

    code: str
    message: str
    eta_s: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """Replicas to keep, replicas to add (function, host, device), and the memory for the next decision. `drain`: ids
    of kept ones that must take no new work; `hosts`: good hosts wanted of each pool; `retire`: hosts, without a
    replica, to give back; `actions`: one sentence for each change. `served`: by function, the proven version that `add`
    means because the newest fails to start, and which is tried again in `trials`."""

    keep: tuple[Placed, ...]
    add: tuple[tuple[str, str, str], ...]
    failures: Mapping[str, Failures]
    drain: tuple[str, ...] = ()
    hosts: Mapping[str, int] = field(default_factory=dict)
    retire: tuple[str, ...] = ()
    reasons: Mapping[str, Reason] = field(default_factory=dict)
    actions: tuple[str, ...] = ()
    memory: Memory = field(default_factory=Memory)
    served: Mapping[str, FunctionSpec] = field(default_factory=dict)
    trials: tuple[tuple[str, str, str], ...] = ()
    proven_failures: Mapping[str, Failures] = field(default_factory=dict)
