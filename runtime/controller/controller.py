"""The controller: holds the lease, looks at queues and hosts, asks the policy, and writes down what hosts should have.

Edge and level: it wakes when a bell rings (a first job, a host's change, a deployment) and sweeps anyway.
"""

import asyncio
import logging
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from redis.exceptions import RedisError

from stoker.coldstart.store import open_store
from stoker.queue.broker import Broker
from stoker.queue.client import connect
from stoker.queue.cluster import BELL, Cluster, Host, Signal
from stoker.queue.records import Backlog
from stoker.runtime.controller.fleet_plan import Orders, must_leave
from stoker.runtime.controller.fleet_report import Told, fleet_report
from stoker.runtime.controller.isolation import Isolation
from stoker.runtime.controller.leader import Leadership
from stoker.runtime.controller.policy import Wanted
from stoker.runtime.controller.policy_record import from_record, to_record
from stoker.runtime.controller.policy_rollout import Rollout, remember_proven, rollouts, told, with_starts_asked
from stoker.runtime.controller.policy_state import Decision, Demand, Failures, Memory, Placed, Rules, View
from stoker.runtime.controller.provider import Provider
from stoker.runtime.controller.silent_hosts import silent_since, spared, tell
from stoker.runtime.controller.sweeping import sweeps
from stoker.runtime.error_record import bounded
from stoker.runtime.settings import Settings
from stoker.runtime.spec import FunctionSpec, readable
from stoker.runtime.tenancy.directory import Directory
from stoker.runtime.tenancy.ledger import Ledger

SWEEP_S = 0.25
REMEMBER_S = 60.0

log = logging.getLogger("stoker.controller")


class Controller:
    """One of possibly several; only the one that holds the lease acts."""

    def __init__(
        self, broker: Broker, cluster: Cluster, leadership: Leadership, provider: Provider, rules: Rules
    ) -> None:
        self._broker = broker
        self._cluster = cluster
        self._leadership = leadership
        self._provider = provider
        self._rules = rules
        self._failures: Mapping[str, Failures] = {}
        self._proven_failures: Mapping[str, Failures] = {}
        self._proven: dict[str, FunctionSpec] | None = None
        self._rollouts: Mapping[str, Rollout] = {}
        self._memory: Memory | None = None
        self._remembered_at = 0.0
        self._isolation = Isolation()
        self._trouble = ""
        self._told = Told()
        self._said: tuple[str, ...] = ()
        self._silent: dict[str, float] = {}
        self._awake: frozenset[bytes] = frozenset()

    def heeds(self, message: bytes) -> bool:
        """Whether a bell's message is a reason to look now. A job of a function that has a replica is none."""
        return message not in self._awake

    async def run(self, bell: Signal, stop: asyncio.Event) -> None:
        providing = asyncio.create_task(self._provider.run())
        try:
            while not stop.is_set():
                await self._try_sweep()
                await bell.wait(SWEEP_S)
        finally:
            providing.cancel()
            await asyncio.gather(providing, return_exceptions=True)
        await self._leadership.release()

    async def _try_sweep(self) -> None:
        """The same trouble, four times a second, is told once."""
        trouble = ""
        try:
            await self.sweep()
        except RedisError as error:
            log.warning("sweep: %s", error)
        except Exception as error:
            trouble = repr(error)
            if trouble != self._trouble:
                log.exception("sweep failed, and is tried again")
        self._trouble = trouble

    async def sweep(self) -> None:
        if not await self._leadership.acquire():
            return
        hosts = await self._cluster.hosts()
        specs = readable(await self._cluster.functions())
        await self._broker.tick_all(specs)
        backlogs = await self._broker.backlogs(list(specs))
        wanted = await self._cluster.wanted()
        now, fleet = time.monotonic(), self._provider.fleet(hosts)
        kept = self._spare(wanted, hosts, now)
        counted = {host: replicas for host, replicas in wanted.items() if host not in kept}
        view = view_of(now, specs, backlogs, hosts, counted, self._failures)
        memory = await self._remembered(now)
        view = replace(view, memory=memory, rules=self._rules, pools=fleet.pools, machines=fleet.machines)
        view = with_starts_asked(await self._with_proven(view), await self._cluster.asked_starts())
        decision = self._isolation.decide(view)
        self._awake = awake(decision)
        await self._remember(decision.memory, now)
        await self._report_failures(decision, now)
        self._say(decision.actions)
        self._say_rollouts(rollouts(view, decision.failures, decision.served))
        after = {**merge(decision, wanted, view), **kept}
        if after != wanted:
            if not await self._cluster.write_wanted(self._leadership.candidate, after):
                return
            log.info("wanted: %s", summary(after))
        self._provider.order(Orders(decision.hosts, frozenset(decision.retire), frozenset(after), fleet.look))
        await self._told.tell(self._cluster, fleet_report(fleet, hosts, decision.reasons, self._rollouts))

    def _spare(self, wanted: Wanted, hosts: Mapping[str, Host], now: float) -> Wanted:
        before, self._silent = self._silent, silent_since(wanted, hosts, self._silent, now)
        tell(self._silent, before, hosts)
        return spared(wanted, self._silent, now)

    async def _with_proven(self, view: View) -> View:
        if self._proven is None:
            self._proven = readable(await self._cluster.proven())
        view = replace(view, proven=self._proven, proven_failures=self._proven_failures)
        proven = remember_proven(view)
        if proven != self._proven:
            records = {name: spec.to_dict() for name, spec in proven.items()}
            if await self._cluster.write_proven(self._leadership.candidate, records):
                self._proven = proven
        return replace(view, proven=proven)

    async def _report_failures(self, decision: Decision, now: float) -> None:
        if (decision.failures, decision.proven_failures) != (self._failures, self._proven_failures):
            self._failures, self._proven_failures = decision.failures, decision.proven_failures
            await self._cluster.report_failing(failing_functions(decision, now, time.time()))

    async def _remembered(self, now: float) -> Memory:
        if self._memory is None:
            self._memory = from_record(await self._cluster.policy_memory(), now, time.time())
            self._remembered_at = now
        return self._memory

    async def _remember(self, memory: Memory, now: float) -> None:
        """For the next controller, once in a while: what it misses of the last minute is soon learned anew."""
        self._memory = memory
        if now - self._remembered_at >= REMEMBER_S:
            self._remembered_at = now
            record = to_record(memory, now, time.time())
            await self._cluster.write_policy_memory(self._leadership.candidate, record)

    def _say(self, actions: tuple[str, ...]) -> None:
        if actions and actions != self._said:
            log.info("%s", "; ".join(actions))
        self._said = actions

    def _say_rollouts(self, now: Mapping[str, Rollout]) -> None:
        for name, rollout in now.items():
            if rollout != self._rollouts.get(name):
                log.warning("%s", told(name, rollout))
        self._rollouts = now


def view_of(
    now: float,
    specs: Mapping[str, FunctionSpec],
    backlogs: Mapping[str, Backlog],
    hosts: Mapping[str, Host],
    wanted: Wanted,
    failures: Mapping[str, Failures],
) -> View:
    """The policy's view from what the queue and the hosts report."""
    demands = {name: demand_of(log) for name, log in backlogs.items()}
    placed = [
        placed_replica(id, record, host, report_of(hosts, host, id))
        for host, replicas in wanted.items()
        for id, record in replicas.items()
    ]
    devices = {id: host.body["devices"] for id, host in hosts.items() if not must_leave(host.body)}
    return View(now, specs, demands, devices, tuple(placed), failures)


def awake(decision: Decision) -> frozenset[bytes]:
    """The functions that a ready replica takes new work of."""
    ready = (each for each in decision.keep if each.state == "ready" and not each.draining)
    return frozenset(each.function.encode() for each in ready if each.id not in decision.drain)


def demand_of(log: Backlog) -> Demand:
    idle_s, oldest_s = log.last_active_ms / 1000, log.oldest_ms / 1000
    return Demand(log.queued, log.running, log.delayed, idle_s, oldest_s, log.arrived_per_s, log.drained_per_s)


def placed_replica(id: str, record: dict[str, Any], host: str, report: Mapping[str, Any]) -> Placed:
    spec, state = record["spec"], report.get("state", "unseen")
    device, error = record["device"], report.get("error")
    inflight, draining = report.get("inflight", 0), record.get("draining", False)
    born, settled = spec.get("born", ""), report.get("settled", True)
    about = (state, error, born, inflight, draining, settled, report.get("cold_start") is not None)
    return Placed(id, spec["name"], spec["version"], host, device, *about)


def report_of(hosts: Mapping[str, Host], host: str, replica: str) -> Mapping[str, Any]:
    return (hosts[host].body["replicas"].get(replica) if host in hosts else None) or {}


def failing_functions(decision: Decision, now: float, clock: float) -> dict[str, Any]:
    """What gateways tell callers of functions that wait for their next try; `clock` is the wall clock at `now`. While a
    proven version serves for one that fails, only its own failures keep callers waiting."""
    own = {name: known for name, known in decision.failures.items() if name not in decision.served}
    versions = {name: known.version for name, known in decision.failures.items()}
    return {
        name: {
            "version": versions[name],
            "count": failed.count,
            "error": bounded(failed.error) if failed.error else {},
            "retry_at": clock + failed.retry_at - now,
        }
        for name, failed in {**own, **decision.proven_failures}.items()
        if failed.count and failed.retry_at > now
    }


def merge(decision: Decision, wanted: Wanted, view: View) -> Wanted:
    """The records of the replicas to keep, plus new ones for those to add."""
    after: Wanted = {}
    for replica in decision.keep:
        record = wanted[replica.host][replica.id]
        after.setdefault(replica.host, {})[replica.id] = record
        if replica.id in decision.drain and not record.get("draining"):
            after[replica.host][replica.id] = {**record, "draining": True}
    added = [({**view.specs, **decision.served}, each) for each in decision.add]
    for specs, (function, host, device) in [*added, *((view.specs, each) for each in decision.trials)]:
        record = new_record(specs[function], device, decision, view)
        after.setdefault(host, {})[f"{function}-{uuid.uuid4().hex[:6]}"] = record
    return after


def new_record(spec: FunctionSpec, device: str, decision: Decision, view: View) -> dict[str, Any]:
    """`relieves`: others serve the jobs that wait, or can be woken to, should this one fail to start."""
    failures = decision.proven_failures if decision.served.get(spec.name) == spec else decision.failures
    proven = view.proven.get(spec.name, spec)
    serving = any(kept.function == spec.name and kept.state == "ready" for kept in decision.keep)
    return {
        "spec": spec.to_dict(),
        "device": device,
        "failed_before": failures.get(spec.name, Failures()).count,
        "relieves": serving or proven.version != spec.version,
    }


def summary(wanted: Wanted) -> str:
    return ", ".join(f"{host}: {sorted(replicas)}" for host, replicas in sorted(wanted.items())) or "nothing"


MakeProvider = Callable[[Cluster, Leadership], Provider]


async def serve(settings: Settings, make_provider: MakeProvider) -> None:
    """Runs a controller until SIGTERM or SIGINT."""
    client = connect(settings.redis_url)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    cluster = Cluster(client)
    broker = Broker(client, lease_ms=settings.lease_ms)
    leadership = Leadership(cluster, f"controller-{uuid.uuid4().hex[:8]}")
    rules = Rules(host_idle_s=settings.host_idle_s)
    controller = Controller(broker, cluster, leadership, make_provider(cluster, leadership), rules)
    bell = Signal(settings.redis_url, BELL, controller.heeds)
    await bell.start()
    stopping = asyncio.create_task(stop.wait())
    stopping.add_done_callback(lambda _: bell.ring())
    store = open_store(settings.store)
    chores = [
        asyncio.create_task(chore)
        for chore in (*sweeps(store, broker, cluster), Ledger(client, Directory(client), store).run())
    ]
    try:
        await controller.run(bell, stop)
    finally:
        for chore in chores:
            chore.cancel()
        await asyncio.gather(*chores, return_exceptions=True)
        await bell.close()
        await client.aclose()
