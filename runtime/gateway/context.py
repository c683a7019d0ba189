"""Everything the handlers of one gateway process share."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from stoker.coldstart.store import ObjectStore, open_store
from stoker.queue.broker import Broker
from stoker.queue.client import check_server, connect
from stoker.queue.cluster import Cluster
from stoker.queue.deliveries import Deliveries
from stoker.queue.events import EventBus
from stoker.queue.listing import Listing
from stoker.queue.retry import insist
from stoker.runtime.batches.batch_shelf import BatchShelf
from stoker.runtime.batches.file_shelf import FileShelf
from stoker.runtime.gateway.auth import Doorkeeper
from stoker.runtime.gateway.calling_jobs import why_waits
from stoker.runtime.gateway.cluster_view import ClusterView
from stoker.runtime.gateway.input_checks import InputChecks
from stoker.runtime.gateway.job_ids import JobIds
from stoker.runtime.gateway.letting_go import Followings
from stoker.runtime.gateway.metrics import Metrics
from stoker.runtime.gateway.prompts import PromptEncoders
from stoker.runtime.gateway.quota import Quota
from stoker.runtime.gateway.registry import Registry
from stoker.runtime.gateway.settings import GatewaySettings
from stoker.runtime.routing.lessons import Lessons
from stoker.runtime.tenancy.admission import Admission
from stoker.runtime.tenancy.api_key import Keyring
from stoker.runtime.tenancy.audit import AuditLog
from stoker.runtime.tenancy.directory import Directory
from stoker.runtime.tenancy.ledger import Ledger
from stoker.runtime.tenancy.vault import Vault
from stoker.runtime.webhooks.secret_shelf import SecretShelf

START_PATIENCE_S = 30.0
WHY_TIMEOUT_S = 2.0

log = logging.getLogger("stoker.gateway")


@dataclass
class Gateway:
    settings: GatewaySettings
    metrics: Metrics
    redis: Redis
    broker: Broker
    bus: EventBus
    cluster: Cluster
    registry: Registry
    view: ClusterView
    prompts: PromptEncoders
    store: ObjectStore
    tenants: Directory
    keyring: Keyring | None
    doorkeeper: Doorkeeper
    quota: Quota
    ledger: Ledger
    files: FileShelf
    batches: BatchShelf
    audit: AuditLog
    vault: Vault
    deliveries: Deliveries = field(init=False)
    listing: Listing = field(init=False)
    job_ids: JobIds = field(init=False)
    webhooks: SecretShelf = field(init=False)
    inputs: InputChecks = field(default_factory=InputChecks)
    lessons: Lessons = field(default_factory=Lessons)
    followings: Followings = field(default_factory=Followings)
    new_batch: asyncio.Event = field(default_factory=asyncio.Event)
    _background: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.deliveries, self.listing = Deliveries(self.redis), Listing(self.redis)
        self.job_ids = JobIds(self.settings.secret)
        self.webhooks = SecretShelf(self.redis, self.settings.secret)

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Work that outlives its request; failures are logged."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.warning("background work failed: %s", error)

    async def why_waiting(self, job_id: str) -> str:
        """The comment of a stream that has nothing to say yet. If the job has ended, its last events are read now."""
        try:
            async with asyncio.timeout(WHY_TIMEOUT_S):
                job = await self.broker.job(job_id)
                reason = await why_waits(self.broker, await self.view.snapshot(), job) if job else ""
        except (RedisError, TimeoutError):
            return "waiting for the queue"
        if job is None or job.state.terminal:
            self.bus.read(job_id)
            return "waiting for the last events"
        return reason or str(job.state)

    async def finish_background(self, grace_s: float) -> None:
        if self._background:
            await asyncio.wait(self._background, timeout=grace_s)
        for task in self._background:
            task.cancel()


@asynccontextmanager
async def open_gateway(settings: GatewaySettings) -> AsyncIterator[Gateway]:
    """Raises ServerUnfit for a server that would lose jobs; waits a moment for one that can't be reached yet."""
    redis = connect(settings.redis_url)
    broker, cluster = Broker(redis), Cluster(redis)
    bus = EventBus(settings.redis_url, broker, settings.gateway_id)
    registry, tenants, store = Registry(cluster), Directory(redis), open_store(settings.store_url)
    keyring = Keyring(settings.keys_secret) if settings.keys_secret else None
    gateway = Gateway(
        settings=settings,
        metrics=Metrics(),
        redis=redis,
        broker=broker,
        bus=bus,
        cluster=cluster,
        registry=registry,
        view=ClusterView(broker, cluster, registry),
        prompts=PromptEncoders(),
        store=store,
        tenants=tenants,
        keyring=keyring,
        doorkeeper=Doorkeeper(tenants, keyring),
        quota=Quota(Admission(redis), tenants),
        ledger=Ledger(redis, tenants, store),
        files=FileShelf(store),
        batches=BatchShelf(redis),
        audit=AuditLog(redis, settings.secret or settings.keys_secret),
        vault=Vault(redis, settings.secret),
    )
    try:
        await insist(lambda: check_server(redis), START_PATIENCE_S)
        await insist(bus.start, START_PATIENCE_S)
        yield gateway
    finally:
        await gateway.finish_background(grace_s=2.0)
        await bus.close()
        gateway.prompts.close()
        gateway.inputs.close()
        await redis.aclose()
