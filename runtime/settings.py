"""Settings of a stoker process. Only this module and the command line read the environment."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

METADATA_URL = "http://169.254.169.254"


@dataclass(frozen=True, slots=True)
class Settings:
    """`data_dir` holds the embedded server, caches and logs of this machine; `store_url` is the object store.

    `secret` is the deployment's (see secret.py); `auth` is "keys" where callers need an API key, "open" where not, and
    "" for open on loopback addresses only.

    `cluster` names the pools that an AWS controller scales, `pool` the one that this host belongs to; `metadata_url` is
    where an EC2 instance learns about itself. A pool's host is given back after `host_idle_s` without a replica.

    Functions on this host find the gateway at `gateway_url`.

    Webhooks go to public addresses, and to the networks in `webhook_allow` (CIDR, with commas between them).

    Weights from a bucket are kept in `cache_dir` (by default in `data_dir`), up to `cache_gb` (0: none); with a
    `peer_port` other hosts of the deployment may fetch them there. `ring_mb` is the memory through which weights pass,
    16 MiB for each read that there may be at once.

    A model that nobody asks for any more stays in its host's memory for `park_s` more seconds (None: 300 for one on a
    GPU, 0 on a CPU); all such models take up to `park_gb` (0: half of the host's memory).

    Of the prompts that a language model's requests have in common, what was computed is kept in the store while it
    sleeps: up to `prompt_cache_mb` for each function (0: none).

    All models of one device have up to `device_memory_gb` of its memory together (0: nearly all that is free); those
    that don't fit at once take turns.

    A process that is told to stop lets what it has begun go on for `drain_s` (None: 25 for a gateway, 30 for a host's
    jobs, and 3 under `stoker up`).

    With `check_device` every load ends with the checksums of the bytes on the device."""

    data_dir: Path
    redis_url: str = ""
    store_url: str = ""
    lease_ms: int = 10_000
    log_level: str = "info"
    secret: str = field(default="", repr=False)
    auth: str = ""
    cluster: str = ""
    pool: str = ""
    metadata_url: str = METADATA_URL
    webhook_allow: str = ""
    gateway_url: str = ""
    host_idle_s: float = 30.0
    cache_dir: Path | None = None
    cache_gb: float = 50.0
    peer_port: int = 0
    ring_mb: int = 256
    park_s: float | None = None
    park_gb: float = 0.0
    prompt_cache_mb: int = 256
    device_memory_gb: float = 0.0
    check_device: bool = False
    drain_s: float | None = None

    @property
    def store(self) -> str:
        return self.store_url or (self.data_dir / "store").resolve().as_uri()

    @property
    def cache_folder(self) -> Path:
        return self.cache_dir or self.data_dir / "chunks"

    @property
    def socket(self) -> Path:
        return self.data_dir / "valkey" / "valkey.sock"

    def with_(self, **changes: Any) -> "Settings":
        return replace(self, **changes)


def from_environment() -> Settings:
    """STOKER_DATA, STOKER_REDIS, STOKER_STORE, STOKER_LEASE_MS, STOKER_LOG_LEVEL, STOKER_SECRET, STOKER_AUTH,
    STOKER_CLUSTER, STOKER_POOL, STOKER_HOST_IDLE_S, STOKER_CACHE, STOKER_CACHE_GB, STOKER_PEER_PORT, STOKER_RING_MB,
    STOKER_PARK_S, STOKER_PARK_GB, STOKER_PROMPT_CACHE_MB, STOKER_DEVICE_MEMORY_GB, STOKER_CHECK_DEVICE, STOKER_DRAIN_S,
    and AWS_EC2_METADATA_SERVICE_ENDPOINT as boto3 knows it."""
    return Settings(
        data_dir=Path(os.environ.get("STOKER_DATA", ".stoker")).resolve(),
        redis_url=os.environ.get("STOKER_REDIS", ""),
        store_url=os.environ.get("STOKER_STORE", ""),
        lease_ms=int(os.environ.get("STOKER_LEASE_MS", "10000")),
        log_level=os.environ.get("STOKER_LOG_LEVEL", "info"),
        secret=os.environ.get("STOKER_SECRET", ""),
        auth=os.environ.get("STOKER_AUTH", ""),
        cluster=os.environ.get("STOKER_CLUSTER", ""),
        pool=os.environ.get("STOKER_POOL", ""),
        metadata_url=os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", METADATA_URL),
        webhook_allow=os.environ.get("STOKER_WEBHOOK_ALLOW", ""),
        gateway_url=os.environ.get("STOKER_URL", ""),
        host_idle_s=float(os.environ.get("STOKER_HOST_IDLE_S", "30")),
        cache_dir=Path(cache).resolve() if (cache := os.environ.get("STOKER_CACHE", "")) else None,
        cache_gb=float(os.environ.get("STOKER_CACHE_GB", "50")),
        peer_port=int(os.environ.get("STOKER_PEER_PORT", "0")),
        ring_mb=int(os.environ.get("STOKER_RING_MB", "256")),
        park_s=float(seconds) if (seconds := os.environ.get("STOKER_PARK_S", "")) else None,
        park_gb=float(os.environ.get("STOKER_PARK_GB", "0")),
        prompt_cache_mb=int(os.environ.get("STOKER_PROMPT_CACHE_MB", "256")),
        device_memory_gb=float(os.environ.get("STOKER_DEVICE_MEMORY_GB", "0")),
        check_device=os.environ.get("STOKER_CHECK_DEVICE", "") == "1",
        drain_s=float(seconds) if (seconds := os.environ.get("STOKER_DRAIN_S", "")) else None,
    )


def to_environment(settings: Settings) -> dict[str, str]:
    """What `from_environment` of a child process must see to get the same settings."""
    return {
        "STOKER_DATA": str(settings.data_dir),
        "STOKER_REDIS": settings.redis_url,
        "STOKER_STORE": settings.store,
        "STOKER_LEASE_MS": str(settings.lease_ms),
        "STOKER_LOG_LEVEL": settings.log_level,
        "STOKER_SECRET": settings.secret,
        "STOKER_AUTH": settings.auth,
        "STOKER_CLUSTER": settings.cluster,
        "STOKER_POOL": settings.pool,
        "STOKER_WEBHOOK_ALLOW": settings.webhook_allow,
        "STOKER_URL": settings.gateway_url,
        "STOKER_HOST_IDLE_S": str(settings.host_idle_s),
        "STOKER_CACHE": str(settings.cache_folder),
        "STOKER_CACHE_GB": str(settings.cache_gb),
        "STOKER_PEER_PORT": str(settings.peer_port),
        "STOKER_RING_MB": str(settings.ring_mb),
        "STOKER_PARK_S": "" if settings.park_s is None else str(settings.park_s),
        "STOKER_PARK_GB": str(settings.park_gb),
        "STOKER_PROMPT_CACHE_MB": str(settings.prompt_cache_mb),
        "STOKER_DEVICE_MEMORY_GB": str(settings.device_memory_gb),
        "STOKER_CHECK_DEVICE": str(int(settings.check_device)),
        "STOKER_DRAIN_S": "" if settings.drain_s is None else str(settings.drain_s),
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": settings.metadata_url,
    }
