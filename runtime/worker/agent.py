"""The host agent: one long-lived process per host that has the replicas the controller wants, renews the leases of
their jobs and reports what they do. It never imports torch and never opens a CUDA context."""

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import time
import uuid
from typing import Any

from redis.exceptions import RedisError

from stoker.coldstart.ring import SLOT_BYTES, Ring
from stoker.queue.broker import Broker
from stoker.queue.client import connect
from stoker.queue.cluster import WANTED, Cluster, Signal
from stoker.queue.events import Bells
from stoker.runtime.logs.log_book import LogBook
from stoker.runtime.processes import hide_from_peers
from stoker.runtime.settings import Settings
from stoker.runtime.spec import FunctionSpec
from stoker.runtime.tenancy.directory import Directory
from stoker.runtime.tenancy.passes import Passes
from stoker.runtime.tenancy.vault import Vault
from stoker.runtime.worker.devices import find_devices, gpu_facts
from stoker.runtime.worker.embed_replica import EmbedReplica
from stoker.runtime.worker.function_replica import FunctionReplica
from stoker.runtime.worker.host import Host, log_path
from stoker.runtime.worker.instance import Identity, InstanceMetadata, NoMetadata, Notice
from stoker.runtime.worker.llm_replica import LlmReplica
from stoker.runtime.worker.reconcile import compare
from stoker.runtime.worker.replica import Replica, Start
from stoker.runtime.worker.weight_sources import WeightSources
from stoker.runtime.worker.workplace import why_users_are_shared
from stoker.runtime.worker.zygote_link import ZygoteLink

REPORT_S = 0.5
RECONCILE_S = 0.1
FAILED_S = 0.2
DRAIN_S = 30.0
MIN_RING_SLOTS = 2
NOTICE_S = 1.0
# What is left of an interruption's two minutes for handing work back, after the replicas have been given theirs.
HAND_BACK_S = 15.0

log = logging.getLogger("stoker.worker")


class Agent:
    """Loops: reconcile (wanted replicas), beat (leases), report (to controller and gateways), and on EC2 a watch for
    the notice to leave: the host then hands its work back and takes no more, but stays to be seen."""

    def __init__(self, host: Host, wanted: Signal, metadata: InstanceMetadata | None, facts: dict[str, Any]) -> None:
        self._host = host
        self._cluster = host.cluster
        self._wanted = wanted
        self._metadata = metadata
        self._facts = facts
        self._notice: Notice | None = None
        self._replicas: dict[str, Replica] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._last_states: dict[str, str] = {}
        self._started_ms = int(time.time() * 1000)

    async def run(self, stop: asyncio.Event) -> None:
        loops = [asyncio.create_task(self._forever(work, pause)) for work, pause in self._loops()]
        try:
            await stop.wait()
        finally:
            for task in loops:
                task.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            await self._drain()

    def lose(self, job_id: str, reason: str) -> None:
        for replica in self._replicas.values():
            replica.lose(job_id, reason)

    def _loops(self) -> list[tuple[Any, float]]:
        lease_s = self._host.settings.lease_ms / 1000
        loops: list[tuple[Any, float]] = [(self._reconcile, 0.0), (self._beat, lease_s / 3), (self._report, REPORT_S)]
        return loops + ([(self._watch, NOTICE_S)] if self._metadata else [])

    async def _forever(self, work: Any, pause: float) -> None:
        """A server that is away is waited for; any other failure is logged and the loop goes on."""
        while True:
            try:
                await work()
                await asyncio.sleep(pause)
            except RedisError as error:
                log.warning("%s: %s", work.__name__, error)
                await asyncio.sleep(FAILED_S)
            except Exception:
                log.exception("%s failed", work.__name__)
                await asyncio.sleep(FAILED_S)

    async def _watch(self) -> None:
        assert self._metadata is not None
        try:
            notice = await self._metadata.notice()
        except NoMetadata as error:
            log.warning("%s", error)
            return
        if notice != self._notice and not self._leaving:
            log.warning("this host is told to leave: %s", notice)
            self._notice = notice
            if self._leaving:
                self._host.leaving = True
                self._hurry()
            await self._report()

    def _hurry(self) -> None:
        """Replicas that were draining at leisure get as long as the host has."""
        for id in [id for id, replica in self._replicas.items() if replica.state == "draining"]:
            self._stop(id)

    @property
    def _leaving(self) -> bool:
        return self._notice is not None and self._notice.final

    async def _reconcile(self) -> None:
        wanted = {} if self._leaving else (await self._cluster.wanted()).get(self._host.id, {})
        for id in [id for id, replica in self._replicas.items() if replica.state == "gone"]:
            del self._replicas[id]
        change = compare(wanted, {id: replica.state for id, replica in self._replicas.items()})
        for id, record in change.start.items():
            self._replicas[id] = replica = self._make(id, record)
            replica.start()
        for id in change.stop:
            self._stop(id)
        for id in change.drain:
            self._stop(id, finish=True)
        if self._states() != self._last_states:
            await self._report()
        await self._wanted.wait(RECONCILE_S)

    def _make(self, id: str, record: dict[str, Any]) -> Replica:
        spec = FunctionSpec.from_dict(record["spec"])
        start = Start(record.get("failed_before", 0), record.get("relieves", False))
        if spec.kind == "python":
            return FunctionReplica(id, spec, self._host, start)
        kind = EmbedReplica if spec.kind == "embed" else LlmReplica
        return kind(id, spec, self._host, start, record["device"])

    def _stop(self, id: str, finish: bool = False) -> None:
        """`finish`: whatever it holds is waited for, unless the host itself has to go."""
        replica = self._replicas[id]
        if replica.state == "failed":
            del self._replicas[id]
        grace_s = math.inf if finish and not self._leaving else drain_s(self._notice, time.time())
        task = asyncio.create_task(replica.stop(grace_s))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    async def _beat(self) -> None:
        """One call per function for all its jobs on this host."""
        held: dict[str, dict[str, int]] = {}
        for replica in self._replicas.values():
            fences = {claim.job_id: claim.fence for claim in replica.held.values()}
            held.setdefault(replica.spec.name, {}).update(fences | replica.aside.fences())
        for function, fences in held.items():
            if fences:
                lost = await self._host.broker.beat(function, self._host.worker, fences)
                for job_id, reason in lost.items():
                    self.lose(job_id, reason)

    async def _report(self) -> None:
        self._last_states = self._states()
        for engine in self._host.engines.values():
            engine.ask_stats()
        body = {
            "id": self._host.id,
            "pid": os.getpid(),
            "hostname": socket.gethostname(),
            "started_ms": self._started_ms,
            "device": self._host.devices[0].partition(":")[0],
            "devices": self._host.devices,
            "engines": {device: engine.pid for device, engine in self._host.engines.items()},
            "device_time": {device: engine.device_time() for device, engine in self._host.engines.items()},
            "replicas": {id: replica.report() for id, replica in self._replicas.items()},
            "notice": self._notice.to_dict() if self._notice else None,
            **self._facts,
        }
        await self._cluster.report_host(self._host.id, body)
        await self._cluster.ring()

    def _states(self) -> dict[str, str]:
        return {id: replica.state for id, replica in self._replicas.items()}

    async def _drain(self) -> None:
        replicas = [replica for replica in self._replicas.values() if replica.state != "failed"]
        self._host.leaving = True
        await self._host.parking.close()
        beats = asyncio.create_task(self._forever(self._beat, self._host.settings.lease_ms / 3000))
        try:
            patience_s = self._host.settings.drain_s
            grace_s = DRAIN_S if patience_s is None else patience_s
            await asyncio.gather(*(replica.stop(grace_s) for replica in replicas), return_exceptions=True)
        finally:
            beats.cancel()
            await asyncio.gather(beats, return_exceptions=True)
        with contextlib.suppress(RedisError):
            await self._cluster.forget_host(self._host.id)


def ring_slots(megabytes: int) -> int:
    return max(MIN_RING_SLOTS, (megabytes << 20) // SLOT_BYTES)


def drain_s(notice: Notice | None, now: float) -> float:
    """How long running work may take on a host with this notice."""
    if notice is None or not notice.final or not notice.at:
        return DRAIN_S
    return min(DRAIN_S, max(0.0, notice.at - now - HAND_BACK_S))


def facts_of(settings: Settings, identity: Identity | None) -> dict[str, Any]:
    """What a host tells about itself besides its load."""
    where = {"kind": identity.kind, "zone": identity.zone, "spot": identity.spot} if identity else {}
    return {"pool": settings.pool, "kind": "", "zone": "", "spot": False, **where, "gpus": gpu_facts()}


async def serve(settings: Settings, host_id: str) -> None:
    """Runs a host agent until SIGTERM or SIGINT, then drains."""
    await run_agent(settings, host_id, None, facts_of(settings, None))


async def serve_instance(settings: Settings) -> None:
    """The same for an EC2 instance of a pool, which goes by its instance id. Raises NoMetadata elsewhere."""
    metadata = InstanceMetadata(settings.metadata_url)
    try:
        identity = await metadata.identity()
        await run_agent(settings, identity.id, metadata, facts_of(settings, identity))
    finally:
        await metadata.close()


async def run_agent(settings: Settings, host_id: str, metadata: InstanceMetadata | None, facts: dict[str, Any]) -> None:
    hide_from_peers()
    client = connect(settings.redis_url)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    worker = f"{host_id}:{uuid.uuid4().hex[:8]}"
    agents: list[Agent] = []
    bells = Bells(settings.redis_url, worker, on_cancel=lambda job_id, why: agents[0].lose(job_id, why))
    ring = Ring.create(ring_slots(settings.ring_mb))
    broker = Broker(client, lease_ms=settings.lease_ms)
    wanted = Signal(settings.redis_url, WANTED)
    zygote = ZygoteLink(log_path(settings, host_id, "zygote"))
    sources = WeightSources(settings, client)
    books = LogBook(client), Vault(client, settings.secret), Passes(Directory(client), settings.secret)
    host = Host(
        host_id, worker, settings, broker, bells, ring, zygote, find_devices(), sources, *books, Cluster(client)
    )
    agents.append(Agent(host, wanted, metadata, facts))
    if shared := why_users_are_shared():
        log.info("functions run as this process's user: %s", shared)
    else:
        settings.data_dir.chmod(0o700)
    await zygote.start()
    await bells.start()
    await wanted.start()
    await sources.start()
    try:
        await agents[0].run(stop)
    finally:
        await sources.close()
        await zygote.close()
        await wanted.close()
        await bells.close()
        await client.aclose()
        ring.close()
