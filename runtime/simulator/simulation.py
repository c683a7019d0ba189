"""Discrete-event simulation of stoker under a scaler: requests, queues, replicas, hosts; reproducible by seed.

The scaler is `policy.decide` itself or one of the reference policies; both get the view that the controller would
give them, at every tick.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stoker.runtime.controller.policy_state import Decision, Demand, Failures, Memory, View
from stoker.runtime.simulator.cluster import NOTICE_S, Setup, SimCluster, SimHost, SimReplica
from stoker.runtime.simulator.traces import Request

Scaler = Callable[[View], Decision]

RATE_WINDOW_S = 20.0
CALM_TICK_S, QUIET_TICK_S, LONGEST_TICK_S = 2.0, 5.0, 15.0
OVERTIME_S = 1800.0
NEVER = float("inf")


class Rate:
    """The queue's moving average of events per second (queue/rates.lua)."""

    def __init__(self) -> None:
        self._sum, self._at, self._since = 0.0, 0.0, 0.0

    def add(self, now: float) -> None:
        decayed = self._sum * math.exp((self._at - now) / RATE_WINDOW_S)
        if decayed < 0.01:
            self._since = now
        self._sum, self._at = decayed + 1, now

    def read(self, now: float) -> float:
        gathered = 1 - math.exp(-max(now - self._since, 1.0) / RATE_WINDOW_S)
        return self._sum * math.exp((self._at - now) / RATE_WINDOW_S) / (RATE_WINDOW_S * gathered)


@dataclass(eq=False)
class Work:
    """One function's queue, its replicas that take work, and its rates."""

    queue: deque[int] = field(default_factory=deque)
    serving: list[SimReplica] = field(default_factory=list)
    running: int = 0
    arrived: Rate = field(default_factory=Rate)
    drained: Rate = field(default_factory=Rate)
    active: float = -math.inf

    def demand(self, now: float, oldest: float) -> Demand:
        idle_s = now - self.active
        return Demand(len(self.queue), self.running, 0, idle_s, oldest, self.arrived.read(now), self.drained.read(now))


@dataclass
class Outcome:
    """`ttft_s`: for each request (infinite: not started in time); `cold`: whether no replica was ready when it came;
    `samples`: (second, replicas, hosts, queued) at ticks where one of them changed; `busy_kills`: replicas that were
    taken away with work on them, interruptions aside."""

    ttft_s: list[float]
    cold: list[bool]
    cost_usd: float = 0.0
    launches: int = 0
    changes: int = 0
    busy_kills: int = 0
    samples: list[tuple[float, int, int, int]] = field(default_factory=list)


class Simulation:
    def __init__(self, setup: Setup, trace: Sequence[Request], scaler: Scaler, pack: bool = False) -> None:
        self._setup = setup
        self._trace = trace
        self._scaler = scaler
        self._pack = pack
        self._horizon_s = trace[-1].time
        self._cluster = SimCluster(setup, self._horizon_s)
        self._work = {name: Work() for name in setup.specs}
        self._replicas: dict[str, SimReplica] = {}
        self._memory = Memory()
        self._failures: dict[str, Failures] = {}
        self._outcome = Outcome([NEVER] * len(trace), [False] * len(trace))
        self._unstarted = len(trace)

    def run(self) -> Outcome:
        arrival, tick, trace = 0, 0.0, self._trace
        events = self._cluster.events
        while True:
            comes = trace[arrival].time if arrival < len(trace) else NEVER
            happens = events[0][0] if events else NEVER
            now = min(comes, happens, tick)
            if now > self._horizon_s and (not self._unstarted or now > self._horizon_s + OVERTIME_S):
                break
            if now == tick:
                self._tick(now)
                tick += max(self._setup.tick_s, self._pause_s(now))
            elif now == comes:
                waits = self._arrive(now, arrival)
                arrival += 1
                tick = now if waits and tick > now + self._setup.tick_s else tick
            else:
                _, _, kind, target, turn = heapq.heappop(events)
                self._happen(now, kind, target, turn)
        return self._finish()

    def _finish(self) -> Outcome:
        for host in list(self._cluster.hosts.values()):
            self._cluster.terminate(self._horizon_s, host)
        self._outcome.cost_usd, self._outcome.launches = self._cluster.cost_usd, self._cluster.launches
        return self._outcome

    def _pause_s(self, now: float) -> float:
        """Until the next tick: none where work waits or a replica starts, some where there is only running work, more
        the longer there is none. The first job that must wait rings the bell."""
        if any(work.queue for work in self._work.values()):
            return 0.0
        if any(replica.state == "loading" for replica in self._replicas.values()):
            return 0.0
        if any(work.running for work in self._work.values()):
            return CALM_TICK_S
        idle_s = now - max(work.active for work in self._work.values())
        return min(LONGEST_TICK_S, max(QUIET_TICK_S, 0.02 * idle_s))

    def _arrive(self, now: float, job: int) -> bool:
        """Whether the job has to wait."""
        work = self._work[self._trace[job].function]
        work.active = now
        work.arrived.add(now)
        self._outcome.cold[job] = not work.serving
        work.queue.append(job)
        self._dispatch(now, work)
        return bool(work.queue)

    def _dispatch(self, now: float, work: Work) -> None:
        while work.queue:
            open_ = [r for r in work.serving if len(r.work.jobs) < r.work.room]
            if not open_:
                return
            busiest = max if self._pack else min
            replica = busiest(open_, key=lambda r: len(r.work.jobs))
            job = work.queue.popleft()
            first = replica.work.admit(now, job, self._trace[job])
            if self._outcome.ttft_s[job] == NEVER:
                self._outcome.ttft_s[job] = now - self._trace[job].time + first
                self._unstarted -= 1
            work.running += 1
            self._expect_end(replica)

    def _expect_end(self, replica: SimReplica) -> None:
        replica.turn += 1
        if replica.work.jobs:
            self._cluster.later(replica.work.next_end(), "ended", replica, replica.turn)

    def _happen(self, now: float, kind: str, target: SimHost | SimReplica, turn: int) -> None:
        if isinstance(target, SimReplica):
            if self._replicas.get(target.id) is target:
                self._replica_event(now, kind, target, turn)
        elif target.id in self._cluster.hosts:
            self._host_event(now, kind, target)

    def _replica_event(self, now: float, kind: str, replica: SimReplica, turn: int) -> None:
        work = self._work[replica.function]
        if kind == "loaded" and replica.state == "loading":
            replica.state = "ready"
            replica.host.weights.add(replica.function)
            work.serving.append(replica)
        elif kind == "ended" and turn == replica.turn:
            for _ in replica.work.take_ended(now):
                work.running -= 1
                work.drained.add(now)
                work.active = now
            self._expect_end(replica)
            if replica.draining and not replica.work.jobs:
                replica.state = "gone"
        self._dispatch(now, work)

    def _host_event(self, now: float, kind: str, host: SimHost) -> None:
        if kind == "booted" and host.state == "pending":
            host.state, host.since = "ready", now
        elif kind == "interrupted":
            host.state, host.since = "interrupted", now
            self._cluster.later(now + NOTICE_S, "killed", host)
        elif kind == "killed":
            for replica in list(host.replicas):
                self._remove(now, replica)
            self._cluster.terminate(now, host)

    def _remove(self, now: float, replica: SimReplica) -> None:
        """What it held goes back to the head of the queue."""
        work = self._work[replica.function]
        held = sorted(replica.work.jobs, reverse=True)
        work.queue.extendleft(held)
        work.running -= len(held)
        if replica in work.serving:
            work.serving.remove(replica)
        replica.host.replicas.remove(replica)
        del self._replicas[replica.id]
        self._dispatch(now, work)

    def _tick(self, now: float) -> None:
        view = self._view(now)
        decision = self._scaler(view)
        self._memory, self._failures = decision.memory, dict(decision.failures)
        before = len(self._replicas)
        self._apply(now, decision)
        self._outcome.changes += len(decision.add) + max(0, before + len(decision.add) - len(self._replicas))
        queued = sum(len(work.queue) for work in self._work.values())
        sample = (len(self._replicas), len(self._cluster.hosts), queued)
        if not self._outcome.samples or self._outcome.samples[-1][1:] != sample:
            self._outcome.samples.append((now, *sample))

    def _view(self, now: float) -> View:
        setup, cluster = self._setup, self._cluster
        up = [host for host in cluster.hosts.values() if host.state != "pending"]
        return View(
            now,
            setup.specs,
            {name: work.demand(now, self._oldest(now, work)) for name, work in self._work.items()},
            {host.id: list(host.pool.devices) for host in up},
            tuple(replica.placed() for replica in self._replicas.values()),
            self._failures,
            {},
            cluster.pools(now),
            tuple(host.machine() for host in cluster.hosts.values()),
            self._memory,
            setup.rules,
        )

    def _oldest(self, now: float, work: Work) -> float:
        return now - self._trace[work.queue[0]].time if work.queue else 0.0

    def _apply(self, now: float, decision: Decision) -> None:
        keep, drain = {replica.id for replica in decision.keep}, set(decision.drain)
        for replica in list(self._replicas.values()):
            if replica.id not in keep:
                self._outcome.busy_kills += bool(replica.work.jobs)
                self._remove(now, replica)
            elif replica.id in drain and not replica.draining:
                self._drain(replica)
        for function, host, device in decision.add:
            replica = self._cluster.start(now, self._setup.specs[function], self._cluster.hosts[host], device)
            self._replicas[replica.id] = replica
        for id in decision.retire:
            self._cluster.terminate(now, self._cluster.hosts[id])
        for pool in self._cluster.pools(now):
            for _ in range(decision.hosts.get(pool.name, 0) - pool.asked):
                self._cluster.launch(now, pool)

    def _drain(self, replica: SimReplica) -> None:
        replica.draining = True
        replica.state = "draining" if replica.work.jobs else "gone"
        work = self._work[replica.function]
        if replica in work.serving:
            work.serving.remove(replica)
