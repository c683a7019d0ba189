"""A tenant's limits over all functions: asked before a job is queued, given back when it was not."""

import asyncio
import math
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from stoker.queue.records import function_of, unpack
from stoker.queue.retry import insist
from stoker.runtime.gateway.errors import ApiError, Headers, queue_full
from stoker.runtime.tenancy.admission import Admission, Rate, Refused
from stoker.runtime.tenancy.directory import Directory
from stoker.runtime.tenancy.price import Price, Quantities, amount
from stoker.runtime.tenancy.tenant import Tenant

FRESH_S = 1.0
PATIENCE_S = 2.0
FIRST_SECOND_US = 1_000_000


class Quota:
    def __init__(self, admission: Admission, directory: Directory) -> None:
        self._admission = admission
        self._directory = directory
        self._prices: dict[str, tuple[float, Price, int]] = {}

    async def take_place(self, account: Tenant, job_id: str) -> None:
        """Of a model's job before it is known how much it asks for, which `reserve` adds. Raises ApiError 429."""
        await self._reserve(account, job_id, Quantities(prompt_tokens=1), early=True)

    async def reserve(self, account: Tenant, job_id: str, payload: bytes) -> Headers:
        """The headers that tell how much is left. Raises ApiError 429, which has them too."""
        return await self._reserve(account, job_id, asked_for(unpack(payload)))

    async def _reserve(self, account: Tenant, job_id: str, asked: Quantities, *, early: bool = False) -> Headers:
        price, typical = await self._price(function_of(job_id))
        cost = max(amount(price, asked), typical)
        tokens = 0 if early else asked.prompt_tokens + asked.completion_tokens
        reserve = partial(self._admission.reserve, account, job_id, tokens, cost, early=early)
        verdict = await insist(reserve, PATIENCE_S)
        told = rate_headers(verdict.rates)
        if verdict.refused:
            refused = refusal(account, verdict.refused, cost)
            refused.headers |= told
            raise refused
        return told

    async def queued(self, tenant: str, job_id: str) -> None:
        await insist(lambda: self._admission.keep(tenant, job_id), PATIENCE_S)

    async def ended(self, tenant: str, job_id: str) -> None:
        await insist(lambda: self._admission.ended(tenant, job_id), PATIENCE_S)

    async def release(self, tenant: str, job_id: str) -> None:
        await insist(lambda: self._admission.release(tenant, job_id), PATIENCE_S)

    async def _price(self, function: str) -> tuple[Price, int]:
        """And what a call has cost lately."""
        read_at, price, typical = self._prices.get(function, (0.0, Price(), 0))
        if not read_at or time.monotonic() - read_at >= FRESH_S:
            asked = self._directory.price(function), self._directory.typical(function)
            price, typical = await asyncio.gather(*asked)
            self._prices[function] = (time.monotonic(), price, typical)
        return price, typical


def asked_for(payload: Mapping[str, Any]) -> Quantities:
    """At most, where that is known: a language model's prompt and its `max_tokens`. Of a function that runs for as long
    as it needs, the first second; the rest is charged when it is known."""
    if "texts" in payload:
        return Quantities(prompt_tokens=sum(map(len, payload["texts"])))
    if "prompt_ids" not in payload:
        return Quantities(run_us=FIRST_SECOND_US)
    params = payload["params"]
    completion = int(params["max_tokens"] or 0) * params.get("n", 1)
    return Quantities(prompt_tokens=len(payload["prompt_ids"]), completion_tokens=completion)


def rate_headers(rates: Iterable[Rate]) -> Headers:
    """OpenAI's: x-ratelimit-{limit,remaining,reset}-{requests,tokens}."""
    return {
        f"x-ratelimit-{name}-{rate.kind}": value
        for rate in rates
        for name, value in (
            ("limit", f"{rate.limit:.0f}"),
            ("remaining", str(rate.remaining)),
            ("reset", duration(rate.reset_s)),
        )
    }


def duration(seconds: float) -> str:
    """Like 12ms, 1.5s and 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 10) / 10, 60)
    return f"{minutes:.0f}m{rest:.0f}s" if minutes else f"{rest:g}s"


def usd(dollars: float) -> str:
    """To the micro-USD, without zeros at the end."""
    return f"{dollars:.6f}".rstrip("0").rstrip(".")


def refusal(account: Tenant, refused: Refused, cost_micro_usd: int) -> ApiError:
    if refused.limit != "budget_usd":
        what = refused.limit.replace("_", " ")
        message = f"Tenant '{account.name}' is at its limit of {refused.most:g} ({what}) at the moment."
        return queue_full(message, refused.retry_after_s)
    message = (
        f"This request could exceed what is left of the month's budget of {usd(refused.most)} USD of tenant "
        f"'{account.name}': it would reserve {usd(cost_micro_usd / 1e6)} USD, and {usd(refused.left)} USD is left."
    )
    return ApiError(
        429,
        message,
        type="insufficient_quota",
        code="budget_exhausted",
        headers={"retry-after": str(max(1, round(refused.retry_after_s))), "x-should-retry": "false"},
    )
