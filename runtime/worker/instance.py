"""This machine as EC2 describes it to itself: who it is, and whether it has to leave (instance metadata, version 2)."""

import time
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Literal

import httpx

TOKEN_LIFE_S = 21_600
PATIENCE_S = 2.0
DATA = "/latest/meta-data/"

Reason = Literal["interruption", "termination", "rebalance"]


class NoMetadata(OSError):
    """The instance metadata service doesn't answer."""


@dataclass(frozen=True, slots=True)
class Identity:
    """`id` is the instance id, `kind` its type (like "g6e.xlarge"); `spot` instances can be taken away."""

    id: str
    kind: str
    zone: str
    spot: bool


@dataclass(frozen=True, slots=True)
class Notice:
    """Why the instance leaves, and when (Unix seconds; 0: not said). After "rebalance" it may stay; the others are
    final."""

    reason: Reason
    at: float = 0.0

    @property
    def final(self) -> bool:
        return self.reason != "rebalance"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class InstanceMetadata:
    """Source: "Use the Instance Metadata Service to access instance metadata" and "Spot Instance interruption notices"
    in the Amazon EC2 user guide."""

    def __init__(self, url: str) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False)
        self._token = ""
        self._token_ends = 0.0

    async def close(self) -> None:
        await self._client.aclose()

    async def identity(self) -> Identity:
        """Raises NoMetadata."""
        id = await self._required("instance-id")
        kind = await self._required("instance-type")
        zone = await self._required("placement/availability-zone")
        return Identity(id, kind, zone, await self._get("instance-life-cycle") == "spot")

    async def notice(self) -> Notice | None:
        """The most final of what is announced. Raises NoMetadata."""
        if action := await self._get("spot/instance-action", json=True):
            return Notice("interruption", seconds(action.get("time")))
        if await self._get("autoscaling/target-lifecycle-state") == "Terminated":
            return Notice("termination")
        if hint := await self._get("events/recommendations/rebalance", json=True):
            return Notice("rebalance", seconds(hint.get("noticeTime")))
        return None

    async def _required(self, path: str) -> str:
        value = await self._get(path)
        if not value:
            raise NoMetadata(f"the instance metadata service has no {path}")
        return value

    async def _get(self, path: str, *, json: bool = False) -> Any:
        """None for what isn't there."""
        try:
            answer = await self._client.get(
                DATA + path, headers={"X-aws-ec2-metadata-token": await self._fresh_token()}
            )
            if answer.status_code == 404:
                return None
            answer.raise_for_status()
            return answer.json() if json else answer.text.strip()
        except (httpx.HTTPError, ValueError) as error:
            raise NoMetadata(f"the instance metadata service at {self._client.base_url}: {error!r}") from error

    async def _fresh_token(self) -> str:
        if time.monotonic() >= self._token_ends:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_LIFE_S)}
            answer = await self._client.put("/latest/api/token", headers=headers)
            answer.raise_for_status()
            self._token, self._token_ends = answer.text, time.monotonic() + TOKEN_LIFE_S / 2
        return self._token


def seconds(stamp: str | None) -> float:
    """Unix seconds of an ISO time in UTC, 0 for none or one that can't be read."""
    try:
        return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp() if stamp else 0.0
    except ValueError:
        return 0.0
