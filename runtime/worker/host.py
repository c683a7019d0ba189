"""What every replica of one host shares: the queue, the bells, the store, the staging ring and the engine processes."""

import asyncio
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from stoker.coldstart.failures import ColdStartError, StoreUnavailable
from stoker.coldstart.ring import Ring
from stoker.coldstart.store import ObjectStore, open_store
from stoker.queue.broker import Broker
from stoker.queue.events import Bells
from stoker.queue.records import Claim, Failure, pack
from stoker.queue.retry import insist
from stoker.runtime import payloads
from stoker.runtime.settings import Settings
from stoker.runtime.worker.engine_link import EngineLink
from stoker.runtime.worker.zygote_link import ZygoteLink

BELL_WAIT_S = 0.25
PATIENCE_S = 3600.0


def log_path(settings: Settings, host: str, name: str) -> Path:
    folder = settings.data_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{host}-{name}.log"


@dataclass
class Host:
    """`worker` names one life of the agent: a restarted agent is a new worker to the queue."""

    id: str
    worker: str
    settings: Settings
    broker: Broker
    bells: Bells
    ring: Ring
    zygote: ZygoteLink
    devices: list[str]
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    engines: dict[str, EngineLink] = field(default_factory=dict)

    @cached_property
    def store(self) -> ObjectStore:
        return open_store(self.settings.store)

    def engine(self, device: str) -> EngineLink:
        if device not in self.engines:
            log = self.log(f"engine-{device.replace(':', '')}")
            self.engines[device] = EngineLink(device, self.ring, self.zygote, log)
        return self.engines[device]

    def log(self, name: str) -> Path:
        return log_path(self.settings, self.id, name)

    async def claim(self, function: str, limit: int) -> list[Claim]:
        """Up to `limit` jobs with their payloads; one whose payload can't be read is failed here."""
        claims = await insist(lambda: self.broker.claim(function, self.worker, limit), PATIENCE_S)
        if not any(payloads.is_reference(claim.payload) for claim in claims):
            return claims
        read = await asyncio.gather(*(self._with_payload(claim) for claim in claims))
        return [claim for claim in read if claim is not None]

    async def _with_payload(self, claim: Claim) -> Claim | None:
        try:
            payload = await asyncio.to_thread(payloads.get, self.store, claim.job_id, claim.payload)
        except ColdStartError as error:
            body = {"type": "internal_error", "message": str(error), "code": type(error).__name__, "traceback": None}
            again = isinstance(error, StoreUnavailable)
            failure = Failure(claim.job_id, claim.fence, pack(body), retry=again)
            await insist(lambda: self.broker.fail(claim.function, [failure]), PATIENCE_S)
            return None
        return replace(claim, payload=payload)

    async def claim_or_wait(self, function: str, limit: int) -> list[Claim]:
        """Up to `limit` jobs; when there are none, waits for the function's bell a moment and returns []."""
        claims = await self.claim(function, limit)
        if not claims:
            await self.bells.wait(function, BELL_WAIT_S)
        return claims
