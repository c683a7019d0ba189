"""What every replica of one host shares: the queue, the bells, the store, the staging ring and the engine processes."""

import asyncio
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from stoker.coldstart.ring import Ring
from stoker.coldstart.store import ObjectStore, open_store
from stoker.queue.broker import Broker
from stoker.queue.claimer import Claimer
from stoker.queue.cluster import Cluster
from stoker.queue.events import Bells
from stoker.runtime.adapters.shelf import AdapterShelf
from stoker.runtime.logs.log_book import LogBook
from stoker.runtime.secret import derive
from stoker.runtime.settings import Settings
from stoker.runtime.tenancy.passes import Passes
from stoker.runtime.tenancy.vault import Vault
from stoker.runtime.worker.engine_link import EngineLink
from stoker.runtime.worker.kernel_store import KernelCache, KernelStore, gpu_model
from stoker.runtime.worker.parking import Parking
from stoker.runtime.worker.prompt_store import PromptStore
from stoker.runtime.worker.tokenizer_shelf import TokenizerShelf
from stoker.runtime.worker.weight_sources import WeightSources
from stoker.runtime.worker.zygote_link import ZygoteLink

BELL_WAIT_S = 0.25
PATIENCE_S = 3600.0


def log_path(settings: Settings, host: str, name: str) -> Path:
    folder = settings.data_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{host}-{name}.log"


@dataclass
class Host:
    """`worker` names one life of the agent: a restarted agent is a new worker to the queue. `leaving`: that ends."""

    id: str
    worker: str
    settings: Settings
    broker: Broker
    bells: Bells
    ring: Ring
    zygote: ZygoteLink
    devices: list[str]
    sources: WeightSources
    logs: LogBook
    vault: Vault
    passes: Passes
    cluster: Cluster
    tokenizers: TokenizerShelf = field(default_factory=TokenizerShelf)
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    engines: dict[str, EngineLink] = field(default_factory=dict)
    leaving: bool = False

    @cached_property
    def store(self) -> ObjectStore:
        return open_store(self.settings.store)

    @cached_property
    def parking(self) -> Parking:
        return Parking(self.settings)

    @cached_property
    def shelf(self) -> AdapterShelf:
        """Of a tenth of the space that weights may have."""
        return AdapterShelf(self.settings.data_dir / "adapters", int(self.settings.cache_gb * 1e8))

    def engine(self, device: str) -> EngineLink:
        if device not in self.engines:
            log = self.log(f"engine-{device.replace(':', '')}")
            kernels = KernelCache(self.settings.data_dir / "kernels" / f"{self.id}-{device.replace(':', '')}")
            limit = int(self.settings.device_memory_gb * 1e9)
            self.engines[device] = EngineLink(device, self.ring, self.zygote, log, kernels, limit)
        return self.engines[device]

    def kernels(self, device: str) -> KernelStore | None:
        """None where no compiled kernels are used, or the driver doesn't tell for which GPU they would be."""
        gpu = gpu_model(device)
        return KernelStore(self.settings.data_dir / "kernels", self.store, gpu) if gpu else None

    @cached_property
    def prompts(self) -> PromptStore:
        folder, key = self.settings.data_dir / "prompts" / self.id, derive(self.settings.secret, "prompt cache")
        return PromptStore(self.store, folder, key, self.settings.prompt_cache_mb << 20)

    def log(self, name: str) -> Path:
        return log_path(self.settings, self.id, name)

    def claimer(self, function: str) -> Claimer:
        return Claimer(self.broker, self.bells, function, self.worker, BELL_WAIT_S)
