"""A tenant's limits over all functions: asked before a job is queued, given back when it was not."""

import time
from collections.abc import Mapping
from typing import Any

from stoker.queue.records import function_of, unpack
from stoker.queue.retry import insist
from stoker.runtime.gateway.errors import ApiError, queue_full
from stoker.runtime.tenancy.admission import Admission, Refused
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

    async def reserve(self, account: Tenant, job_id: str, payload: bytes) -> None:
        """Raises ApiError 429."""
        asked = asked_for(unpack(payload))
        price, typical = await self._price(function_of(job_id))
        cost = max(amount(price, asked), typical)
        tokens = asked.prompt_tokens + asked.completion_tokens
        refused = await insist(lambda: self._admission.reserve(account, job_id, tokens, cost), PATIENCE_S)
        if refused:
            raise refusal(account, refused)

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
            price, typical = await self._directory.price(function), await self._directory.typical(function)
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


def refusal(account: Tenant, refused: Refused) -> ApiError:
    if refused.limit != "budget_usd":
        what = refused.limit.replace("_", " ")
        message = f"Tenant '{account.name}' is at its limit of {refused.most:g} ({what}) at the moment."
        return queue_full(message, refused.retry_after_s)
    message = (
        f"This request could exceed what is left of the month's budget of {refused.most:g} USD of tenant "
        f"'{account.name}'."
    )
    return ApiError(
        429,
        message,
        type="insufficient_quota",
        code="budget_exhausted",
        headers={"retry-after": str(max(1, round(refused.retry_after_s))), "x-should-retry": "false"},
    )
