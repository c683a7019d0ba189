"""What tenants used and what it costs."""

import re
import time
from typing import Any, Literal

from starlette.responses import Response
from typing_extensions import TypedDict

from stoker.runtime.gateway.endpoint import Endpoint, Incoming, Json
from stoker.runtime.gateway.errors import ApiError, bad_request, not_found
from stoker.runtime.spec import base_and_adapter, short_name
from stoker.runtime.tenancy.billing_days import day_of, days_between
from stoker.runtime.tenancy.directory import EVERY_FUNCTION
from stoker.runtime.tenancy.price import InvalidPrice, Price

DAY = re.compile(r"\d{4}-\d\d-\d\d")
MOST_DAYS = 366
ALL_TENANTS = "*"


class UsageRow(TypedDict):
    """Of one tenant's calls of one function on one day (UTC), all with the same `adapter` ("": none). `failed` counts
    jobs that ended without a result, in whatever way: failed, dead, cancelled, expired or timed out. Those that were
    stopped, cancelled or timed out, cost what they used until then; the others nothing."""

    day: str
    tenant: str
    function: str
    adapter: str
    jobs: int
    failed: int
    run_seconds: float
    cold_start_seconds: float
    prefill_seconds: float
    decode_seconds: float
    swap_seconds: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_usd: float


class UsageList(TypedDict):
    object: Literal["list"]
    data: list[UsageRow]


class PriceFields(TypedDict, total=False):
    """US dollars per request, per second of run, and per million tokens."""

    request: float
    second: float
    prompt_tokens: float
    cached_tokens: float
    completion_tokens: float


class PriceObject(PriceFields):
    object: Literal["price"]
    function: str


class PriceList(TypedDict):
    object: Literal["list"]
    data: list[PriceObject]


async def get_usage(incoming: Incoming) -> Response:
    """The caller's own; with scope admin also of another `tenant`, or of all with `*`."""
    today = day_of(time.time())
    days = days_of(incoming.query("from") or today[:8] + "01", incoming.query("to") or today)
    rows = [row for tenant in await tenants_of(incoming) for row in await rows_of(incoming, tenant, days)]
    return Json({"object": "list", "data": rows})


def days_of(first: str, last: str) -> list[str]:
    """Raises ApiError 400."""
    for name, day in (("from", first), ("to", last)):
        if not DAY.fullmatch(day):
            raise bad_request(f"'{name}' must be a day like 2026-01-31.", param=name)
    try:
        days = days_between(first, last)
    except ValueError:
        raise bad_request("'from' and 'to' must be days of the calendar.", param="from") from None
    if not 0 < len(days) <= MOST_DAYS:
        raise bad_request(f"'from' to 'to' must be 1 to {MOST_DAYS} days.", param="to")
    return days


async def tenants_of(incoming: Incoming) -> list[str]:
    """Raises ApiError 403."""
    caller, wanted = incoming.caller, incoming.query("tenant")
    if wanted in ("", caller.tenant):
        return [caller.tenant]
    if "admin" not in caller.scopes:
        raise ApiError(
            403,
            "Only a key with scope admin sees other tenants' usage.",
            type="permission_error",
            code="insufficient_scope",
        )
    if wanted != ALL_TENANTS:
        return [wanted]
    return sorted({caller.tenant, *(tenant.name for tenant in await incoming.gateway.tenants.all())})


async def rows_of(incoming: Incoming, tenant: str, days: list[str]) -> list[UsageRow]:
    found = await incoming.gateway.ledger.daily(tenant, days)
    own = tenant == incoming.caller.owner
    return [row_of(day, tenant, short_name(model) if own else model, sums) for (day, model), sums in found.items()]


def row_of(day: str, tenant: str, model: str, sums: dict[str, int]) -> UsageRow:
    function, adapter = base_and_adapter(model)
    return {
        "day": day,
        "tenant": tenant,
        "function": function,
        "adapter": adapter,
        "jobs": sums["jobs"],
        "failed": sums["failed"],
        "run_seconds": sums["run_us"] / 1e6,
        "cold_start_seconds": sums["cold_us"] / 1e6,
        "prefill_seconds": sums["prefill_us"] / 1e6,
        "decode_seconds": sums["decode_us"] / 1e6,
        "swap_seconds": sums["swap_us"] / 1e6,
        "prompt_tokens": sums["prompt_tokens"],
        "cached_tokens": sums["cached_tokens"],
        "completion_tokens": sums["completion_tokens"],
        "cost_usd": sums["micro_usd"] / 1e6,
    }


async def list_prices(incoming: Incoming) -> Response:
    prices = await incoming.gateway.tenants.prices()
    return Json({"object": "list", "data": [price_object(name, price) for name, price in prices.items()]})


async def put_price(incoming: Incoming) -> Response:
    """Of a function by its full name (`tenant.name` for a tenant's own), or of every function without one: `*`."""
    name = incoming.path("function")
    try:
        price = Price.from_dict(incoming.object())
    except InvalidPrice as error:
        raise bad_request(f"{error}.", code="invalid_price") from None
    if name != EVERY_FUNCTION:
        await incoming.gateway.registry.get(name, param="function")
    await incoming.gateway.tenants.put_price(name, price)
    return Json(price_object(name, price))


async def delete_price(incoming: Incoming) -> Response:
    name = incoming.path("function")
    if not await incoming.gateway.tenants.remove_price(name):
        raise not_found(f"There is no price for '{name}'.", code="price_not_found", param="function")
    return Json(price_object(name, Price()))


def price_object(name: str, price: Price) -> dict[str, Any]:
    return {"object": "price", "function": name, **price.to_dict()}


PERIOD = {
    "from": "First day, like 2026-01-31; the first of this month if left out.",
    "to": "Last day; today if left out.",
    "tenant": "Another tenant, or * for all (scope admin).",
}

USAGE_ENDPOINTS = [
    Endpoint(
        "GET", "/v1/usage", get_usage, "invoke", "Usage by day and function.", "Usage", answer=UsageList, asks=PERIOD
    ),
    Endpoint("GET", "/v1/prices", list_prices, "admin", "All prices.", "Usage", answer=PriceList),
    Endpoint(
        "PUT",
        "/v1/prices/{function}",
        put_price,
        "admin",
        "Set a function's price; `*` is for those without one.",
        "Usage",
        request=PriceFields,
        answer=PriceObject,
        problems={404: "There is no such function."},
    ),
    Endpoint(
        "DELETE",
        "/v1/prices/{function}",
        delete_price,
        "admin",
        "Remove a function's price.",
        "Usage",
        answer=PriceObject,
        problems={404: "The function has no price of its own."},
    ),
]
