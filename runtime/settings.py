"""Settings of a stoker process. Only this module and the command line read the environment."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Settings:
    """`data_dir` holds the embedded server, caches and logs of this machine; `store_url` is the object store."""

    data_dir: Path
    redis_url: str = ""
    store_url: str = ""
    lease_ms: int = 10_000
    log_level: str = "info"

    @property
    def store(self) -> str:
        return self.store_url or (self.data_dir / "store").resolve().as_uri()

    @property
    def socket(self) -> Path:
        return self.data_dir / "valkey" / "valkey.sock"

    def with_(self, **changes: Any) -> "Settings":
        return replace(self, **changes)


def from_environment() -> Settings:
    """STOKER_DATA, STOKER_REDIS, STOKER_STORE, STOKER_LEASE_MS, STOKER_LOG_LEVEL."""
    return Settings(
        data_dir=Path(os.environ.get("STOKER_DATA", ".stoker")).resolve(),
        redis_url=os.environ.get("STOKER_REDIS", ""),
        store_url=os.environ.get("STOKER_STORE", ""),
        lease_ms=int(os.environ.get("STOKER_LEASE_MS", "10000")),
        log_level=os.environ.get("STOKER_LOG_LEVEL", "info"),
    )


def to_environment(settings: Settings) -> dict[str, str]:
    """What `from_environment` of a child process must see to get the same settings."""
    return {
        "STOKER_DATA": str(settings.data_dir),
        "STOKER_REDIS": settings.redis_url,
        "STOKER_STORE": settings.store,
        "STOKER_LEASE_MS": str(settings.lease_ms),
        "STOKER_LOG_LEVEL": settings.log_level,
    }
