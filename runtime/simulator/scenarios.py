"""Named traces and policies to simulate: what `stoker simulate` and benchmarks/scaling.py run."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from stoker.runtime.controller.policy import decide
from stoker.runtime.controller.policy_state import Pool, Rules
from stoker.runtime.simulator import traces
from stoker.runtime.simulator.cluster import Setup
from stoker.runtime.simulator.measured import ASSUMED, ASSUMED_USD_PER_H, Starts
from stoker.runtime.simulator.references import Fixed, IdleTimeout, Keda, Kpa, Reference, Steps, Target
from stoker.runtime.simulator.report import Row, summarise
from stoker.runtime.simulator.simulation import Simulation
from stoker.runtime.simulator.traces import CHAT, IMAGE, Request, Sizes
from stoker.runtime.spec import SLO, FunctionSpec, ModelOptions, Scaling

HOUR_S = 3600.0
SETTLE_S = 600.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A synthetic trace: the requests' sizes, how long it lasts, how its times are drawn, what it costs to be fair to
    policies that start from nothing (the first `SETTLE_S` don't count where there is traffic from the start)."""

    about: str
    sizes: Sizes
    duration_s: float
    times: Callable[[float, int], Iterable[float]]
    settle_s: float = SETTLE_S

    def trace(self, seed: int, scale: float = 1.0) -> list[Request]:
        return traces.requests(self.times(scale, seed), self.sizes, seed)


def chance(name: str, seed: int) -> random.Random:
    return random.Random(f"{name} {seed}")


def steady(scale: float, seed: int) -> Iterable[float]:
    rate = 8.0 * scale
    return traces.arrivals(traces.poisson(rate), rate, 2 * HOUR_S, chance("poisson", seed))


def daily(scale: float, seed: int) -> Iterable[float]:
    rate = traces.diurnal(0.15 * scale, 3.0 * scale)
    return traces.arrivals(rate, 3.0 * scale, 24 * HOUR_S, chance("diurnal", seed))


def bursty(scale: float, seed: int) -> Iterable[float]:
    rate = traces.bursts(0.3 * scale, 3.0 * scale, 2400.0, 600.0, seed)
    return traces.arrivals(rate, 3.0 * scale, 6 * HOUR_S, chance("bursts", seed))


def crowd(scale: float, seed: int) -> Iterable[float]:
    rate = traces.flash_crowd(2.0 * scale, 20.0 * scale, 0.5 * HOUR_S, 120.0, 900.0)
    return traces.arrivals(rate, 20.0 * scale, 2 * HOUR_S, chance("flash", seed))


def cron(scale: float, seed: int) -> Iterable[float]:
    return traces.timetable(900.0, max(1, round(8 * scale)), 3.0, 12 * HOUR_S, chance("cron", seed))


def sparse(scale: float, seed: int) -> Iterable[float]:
    rate = scale / 600.0
    return traces.arrivals(traces.poisson(rate), rate, 24 * HOUR_S, chance("sparse", seed))


SHAPES = {
    "poisson": Shape("chat, 8 requests/s all the time", CHAT, 2 * HOUR_S, steady),
    "diurnal": Shape("images, 0.15/s at night to 3/s in the evening", IMAGE, 24 * HOUR_S, daily),
    "bursts": Shape("images, 0.3/s, bursts of 3/s for about 10 of 40 minutes", IMAGE, 6 * HOUR_S, bursty),
    "flash-crowd": Shape("chat, 2/s, up to 20/s within two minutes, for 15", CHAT, 2 * HOUR_S, crowd),
    "cron": Shape("images, 8 at once every 15 minutes", IMAGE, 12 * HOUR_S, cron, 3 * HOUR_S),
    "sparse": Shape("images, one about every 10 minutes", IMAGE, 24 * HOUR_S, sparse, 0.0),
}


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy with its setting; `make` None: stoker's own with `rules` and `buffer`
    replicas to spare."""

    name: str
    make: type[Target] | None = None
    options: dict[str, float] = field(default_factory=dict)
    rules: Rules = field(default_factory=Rules)
    buffer: int = 0

    def run(self, setup: Setup, trace: Sequence[Request]) -> Row:
        if self.make is None:
            specs = {name: buffered(spec, self.buffer) for name, spec in setup.specs.items()}
            outcome = Simulation(replace(setup, specs=specs, rules=self.rules), trace, decide).run()
        else:
            # An idle timeout needs replicas that become idle: its router fills one before it uses the next.
            pack = self.make is IdleTimeout
            outcome = Simulation(setup, trace, Reference(self.make, self.options), pack).run()
        return summarise(self.name, setup, trace, outcome)


def buffered(spec: FunctionSpec, count: int) -> FunctionSpec:
    return replace(spec, scaling=replace(spec.scaling, buffer_replicas=count))


def defaults() -> list[Policy]:
    """Every policy as its documentation sets it."""
    return [
        Policy("stoker", rules=Rules(prewarm_usd_per_h=8.0)),
        Policy("kpa 0.7", Kpa),
        Policy("keda 1.0", Keda),
        Policy("steps 1.0", Steps),
        Policy("idle 60 s", IdleTimeout),
    ]


def frontier(most: int) -> list[Policy]:
    """Each policy over a range of the parameter that trades cost for attainment."""
    return stoker_frontier() + reference_frontier(most)


def stoker_frontier() -> list[Policy]:
    found = [Policy("stoker default")]
    found += [Policy(f"stoker {weight:g}", rules=Rules(cold_weight=weight, prewarm_usd_per_h=8.0)) for weight in (1, 5)]
    spare = Rules(prewarm_usd_per_h=8.0)
    return found + [Policy(f"stoker 5 +{more}", rules=spare, buffer=more) for more in (1, 3)]


def reference_frontier(most: int) -> list[Policy]:
    found = [Policy(f"kpa {target:g}", Kpa, {"target": target}) for target in (0.5, 0.7)]
    found += [Policy("keda 1", Keda), Policy("steps 1", Steps)]
    found += [Policy(f"idle {window:g} s", IdleTimeout, {"window_s": window}) for window in (5.0, 300.0, 900.0)]
    counts = sorted({max(1, round(most * share)) for share in (0.35, 0.6, 0.8, 1.0)})
    return found + [Policy(f"fixed {count}", Fixed, {"count": count}) for count in counts]


def setup_for(
    trace: Sequence[Request],
    *,
    seed: int = 0,
    settle_s: float = 0.0,
    ttft_s: float = 1.0,
    max_replicas: int = 32,
    idle_timeout_s: float = 300.0,
    starts: Starts = ASSUMED,
    price_per_h: float = ASSUMED_USD_PER_H,
) -> Setup:
    """One GPU per host, one replica per GPU; a function whose requests have tokens is a language model."""
    specs = {}
    for request in trace:
        if request.function not in specs:
            specs[request.function] = spec_for(request, ttft_s, max_replicas, idle_timeout_s)
    pool = Pool("gpu", price_per_h, max_hosts=max_replicas * len(specs), boot_s=starts.boot_s)
    return Setup(specs, (pool,), starts={name: starts for name in specs}, settle_s=settle_s, seed=seed)


def spec_for(request: Request, ttft_s: float, max_replicas: int, idle_timeout_s: float) -> FunctionSpec:
    scaling, slo = Scaling(0, max_replicas, idle_timeout_s), SLO(ttft_ms=1000 * ttft_s)
    if request.service_s:
        return FunctionSpec(request.function, "python", version="v1", gpu="any", slo=slo, scaling=scaling)
    return FunctionSpec(
        request.function,
        "llm",
        version="v1",
        weights="simulated",
        gpu="any",
        slo=slo,
        scaling=scaling,
        model=ModelOptions(max_seqs=64),
    )
