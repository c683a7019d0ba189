"""A tenant's limits over all functions: reserved before a job is queued, settled when its usage is on record."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from redis.asyncio import Redis

from stoker.runtime.tenancy.billing_days import month_of, seconds_left
from stoker.runtime.tenancy.tenant import Tenant

ADMIT = Path(__file__).with_name("admit.lua").read_text()

KEEP = """
local at = redis.call('TIME')[1] * 1000 + ARGV[2]
for _, place in ipairs({ KEYS[1], KEYS[2] }) do redis.call('ZADD', place, 'XX', at, ARGV[1]) end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[2]) end
"""

RELEASE = """
for _, place in ipairs({ KEYS[1], KEYS[2] }) do redis.call('ZREM', place, ARGV[1]) end
redis.call('HDEL', KEYS[3], ARGV[1])
redis.call('SREM', KEYS[4], ARGV[1])
"""

UNQUEUED_MS = 60_000
QUEUED_MS = 7 * 86_400_000


def meta(tenant: str) -> str:
    """All keys of a tenant share the hash tag {tenant}."""
    return f"stoker:t:{{{tenant}}}:m"


def spent(tenant: str, month: str) -> str:
    return f"stoker:t:{{{tenant}}}:spent:{month}"


@dataclass(frozen=True, slots=True)
class Refused:
    """`limit` names the field of TenantLimits that is used up; `left` is, of a budget, what it has too little of."""

    limit: str
    most: float
    retry_after_s: float
    left: float = 0.0


@dataclass(frozen=True, slots=True)
class Rate:
    """A limit per minute as it stands now: `remaining` of `limit` may come at once, all of it after `reset_s`."""

    kind: Literal["requests", "tokens"]
    limit: float
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """`refused`: None, or what is used up. `rates` are the tenant's, where it has such limits."""

    refused: Refused | None
    rates: tuple[Rate, ...]


class Admission:
    def __init__(self, client: Redis) -> None:
        self._redis: Any = client
        self._admit: Any = client.register_script(ADMIT)
        self._keep: Any = client.register_script(KEEP)
        self._release: Any = client.register_script(RELEASE)

    async def reserve(
        self, tenant: Tenant, job_id: str, tokens: float, cost_micro_usd: int, *, early: bool = False
    ) -> Verdict:
        """Asked again for the same job, it takes nothing more; asked `early`, with no tokens yet and the least cost, it
        takes those the next time. A reservation that is not kept ends after a minute."""
        limits, now = tenant.limits, time.time()
        budget = math.ceil(limits.budget_usd * 1e6)
        most = [limits.requests_per_minute, limits.tokens_per_minute, limits.concurrency, budget]
        arguments = [job_id, tokens, cost_micro_usd, UNQUEUED_MS, *most, round(seconds_left(now) * 1000), int(early)]
        reply = await self._admit(keys=[meta(tenant.name), spent(tenant.name, month_of(now))], args=arguments)
        return verdict_of(reply)

    async def keep(self, tenant: str, job_id: str) -> None:
        """The job was queued: its reservation lasts until it is settled."""
        await self._keep(keys=places(tenant), args=[job_id, QUEUED_MS])

    async def ended(self, tenant: str, job_id: str) -> None:
        """Another job may run. The cost stays reserved until the ledger has entered what was used."""
        await self._redis.zrem(places(tenant)[0], job_id)

    async def release(self, tenant: str, job_id: str) -> None:
        """The job is not there after all."""
        await self._release(keys=[*places(tenant), f"{meta(tenant)}:early"], args=[job_id])


def places(tenant: str) -> list[str]:
    """Jobs that count as running, jobs with a reserved cost (both with the end of their reservation), and that cost."""
    return [f"{meta(tenant)}:{what}" for what in ("live", "held", "reserved")]


def verdict_of(reply: Sequence[Any]) -> Verdict:
    limit, numbers = reply[0].decode(), [float(value) for value in reply[1:]]
    scale = 1e6 if limit == "budget_usd" else 1.0
    refused = Refused(limit, numbers[0] / scale, numbers[1] / 1000, numbers[8] / scale) if limit else None
    rates = [rate_of("requests", numbers[2:5]), rate_of("tokens", numbers[5:8])]
    return Verdict(refused, tuple(rate for rate in rates if rate.limit))


def rate_of(kind: Literal["requests", "tokens"], numbers: Sequence[float]) -> Rate:
    most, left, full_in_ms = numbers
    return Rate(kind, most, int(left), full_in_ms / 1000)
