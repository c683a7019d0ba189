"""Pools and hosts, as the controller last reported them."""

from typing import Any, Literal

from starlette.responses import Response
from typing_extensions import TypedDict

from stoker.runtime.gateway.endpoint import Endpoint, Incoming, Json


class HostObject(TypedDict):
    """`state`: pending (no agent reports yet), ready, interrupted (must leave), retiring, failed, or unlisted: it
    reports, but no pool has it."""

    id: str
    pool: str
    state: str
    kind: str
    zone: str
    spot: bool
    devices: list[str]
    gpus: list[dict[str, Any]]
    replicas: int
    notice: dict[str, Any] | None


class PoolObject(TypedDict):
    """`desired` is what the Auto Scaling group was told, `states` counts its hosts; `error` is why the last start of a
    host failed, and `retry_at` (Unix seconds) when the next is tried."""

    pool: str
    group: str
    gpu: str
    gpus: int
    price_per_h: float
    spot: bool
    min: int
    max: int
    desired: int
    states: dict[str, int]
    failures: int
    error: str
    retry_at: float


class Fleet(TypedDict):
    """`reasons`: what functions with waiting jobs wait for; `rollouts`: which versions fail to start, and what serves
    instead; `trouble`: why pools can't be asked just now."""

    object: Literal["fleet"]
    hosts: list[HostObject]
    pools: list[PoolObject]
    reasons: dict[str, dict[str, Any]]
    rollouts: dict[str, dict[str, Any]]
    trouble: str


async def list_hosts(incoming: Incoming) -> Response:
    report = (await incoming.gateway.view.snapshot()).fleet
    silent = {"hosts": [], "pools": [], "reasons": {}, "rollouts": {}, "trouble": "no controller has reported lately"}
    return Json({"object": "fleet", **(report or silent)})


FLEET_ENDPOINTS = [Endpoint("GET", "/v1/hosts", list_hosts, "admin", "Pools and their hosts.", "System", answer=Fleet)]
