"""Tenants and their API keys, for keys with the scope admin."""

import math
import time
from dataclasses import replace
from typing import Any, Literal, NotRequired

from starlette.responses import Response
from typing_extensions import TypedDict

from stoker.runtime.gateway.endpoint import Incoming, Json
from stoker.runtime.gateway.errors import ApiError, bad_request, not_found
from stoker.runtime.gateway.tenant_removal import remove_tenant
from stoker.runtime.tenancy.api_key import OPERATOR, SCOPES, KeyRecord, Keyring, Scope
from stoker.runtime.tenancy.tenant import InvalidTenant, Tenant, limits_of

MOST_SECONDS = 10 * 366 * 86_400
MOST_KEYS = 100


class LimitFields(TypedDict, total=False):
    requests_per_minute: float
    tokens_per_minute: float
    concurrency: int
    budget_usd: float


class TenantRequest(TypedDict, total=False):
    weight: float
    limits: LimitFields


class TenantObject(TypedDict):
    object: Literal["tenant"]
    name: str
    created_at: float
    weight: float
    limits: LimitFields


class TenantList(TypedDict):
    object: Literal["list"]
    data: list[TenantObject]


class KeyRequest(TypedDict, total=False):
    scopes: list[Scope]
    expires_in_s: float


class RotateRequest(TypedDict, total=False):
    overlap_s: float


class KeyObject(TypedDict):
    """`key` is there only in the answer that made it. `expires_at` is 0 for never."""

    object: Literal["api_key"]
    id: str
    tenant: str
    scopes: list[Scope]
    created_at: float
    expires_at: float
    key: NotRequired[str]


class KeyList(TypedDict):
    object: Literal["list"]
    data: list[KeyObject]


class DeletedTenant(TypedDict):
    object: Literal["tenant"]
    name: str
    deleted: Literal[True]


class DeletedKey(TypedDict):
    object: Literal["api_key"]
    id: str
    deleted: Literal[True]


async def list_tenants(incoming: Incoming) -> Response:
    tenants = await incoming.gateway.tenants.all()
    return Json({"object": "list", "data": [tenant_object(tenant) for tenant in tenants]})


async def get_tenant(incoming: Incoming) -> Response:
    return Json(tenant_object(await named(incoming)))


async def put_tenant(incoming: Incoming) -> Response:
    """Creates it, or changes one that is there: limits left out are then none."""
    name, directory = incoming.path("name"), incoming.gateway.tenants
    if name == OPERATOR:
        raise bad_request(f"'{OPERATOR}' is the operator, who has no limits.", param="name")
    tenant = changed(new_tenant(name), incoming.object())
    if await directory.create(tenant):
        return Json(tenant_object(tenant), status_code=201)
    if incoming.headers.get("if-none-match") == "*":
        raise ApiError(412, f"There is a tenant '{name}' already.", code="tenant_exists", param="name")
    tenant = replace(tenant, created_at=(await named(incoming)).created_at)
    await directory.put(tenant)
    return Json(tenant_object(tenant))


async def patch_tenant(incoming: Incoming) -> Response:
    tenant = changed(await named(incoming), incoming.object())
    await incoming.gateway.tenants.put(tenant)
    return Json(tenant_object(tenant))


async def delete_tenant(incoming: Incoming) -> Response:
    """With its functions, files and batches."""
    name = incoming.path("name")
    if not await remove_tenant(incoming.gateway, name):
        raise tenant_not_found(name)
    return Json({"object": "tenant", "name": name, "deleted": True})


async def list_keys(incoming: Incoming) -> Response:
    keys = await incoming.gateway.tenants.keys_of((await named(incoming)).name)
    return Json({"object": "list", "data": [key_object(record) for record in keys]})


async def post_key(incoming: Incoming) -> Response:
    tenant, directory = await named(incoming), incoming.gateway.tenants
    body = incoming.object()
    scopes, lasts_s = scopes_of(body), seconds_of(body, "expires_in_s", 0.0)
    if len(await directory.keys_of(tenant.name)) >= MOST_KEYS:
        raise bad_request(f"Tenant '{tenant.name}' has {MOST_KEYS} keys: revoke some first.", code="too_many_keys")
    text, record = keyring(incoming).make(tenant.name, scopes, time.time() + lasts_s if lasts_s else 0.0)
    await directory.put_key(record)
    return Json({**key_object(record), "key": text}, status_code=201)


async def rotate_key(incoming: Incoming) -> Response:
    """A new key with the old one's scopes and end; the old one works for `overlap_s` more."""
    old = await own_key(incoming)
    overlap_s = seconds_of(incoming.object(), "overlap_s", 3600.0)
    text, record = keyring(incoming).make(old.tenant, old.scopes, old.expires_at)
    await incoming.gateway.tenants.rotate(old, record, overlap_s)
    return Json({**key_object(record), "key": text}, status_code=201)


async def delete_key(incoming: Incoming) -> Response:
    """No call with it begins any more; one that is under way, and its jobs, may finish."""
    record = await own_key(incoming)
    await incoming.gateway.tenants.revoke(record.id)
    return Json({"object": "api_key", "id": record.id, "deleted": True})


async def named(incoming: Incoming) -> Tenant:
    """The tenant of this path. Raises ApiError 404."""
    name = incoming.path("name")
    tenant = await incoming.gateway.tenants.get(name)
    if tenant is None:
        raise tenant_not_found(name)
    return tenant


async def own_key(incoming: Incoming) -> KeyRecord:
    """The key of this path, if it is this tenant's and alive. Raises ApiError 404."""
    tenant, key_id = await named(incoming), incoming.path("key")
    record = await incoming.gateway.tenants.key(key_id)
    if record is None or record.tenant != tenant.name or not record.alive(time.time()):
        raise not_found(f"Tenant '{tenant.name}' has no key '{key_id}'.", code="key_not_found", param="key")
    return record


def keyring(incoming: Incoming) -> Keyring:
    if incoming.gateway.keyring is None:
        raise ApiError(
            409,
            "This gateway asks for no keys, so it makes none: start it with --auth keys (STOKER_AUTH=keys).",
            code="keys_not_used",
        )
    return incoming.gateway.keyring


def new_tenant(name: str) -> Tenant:
    try:
        return Tenant(name, created_at=time.time())
    except InvalidTenant as error:
        raise bad_request(f"{error}.", param="name", code="invalid_tenant") from None


def changed(tenant: Tenant, body: dict[str, Any]) -> Tenant:
    """Raises ApiError 400 for an unknown field or a value that can't work."""
    if unknown := sorted(set(body) - {"weight", "limits"}):
        raise bad_request(f"Unknown field '{unknown[0]}'; a tenant has 'weight' and 'limits'.", param=unknown[0])
    limits = body.get("limits", {})
    if not isinstance(limits, dict):
        raise bad_request("'limits' must be an object.", param="limits")
    try:
        merged = limits_of({**tenant.to_dict()["limits"], **limits})
        return replace(tenant, weight=body.get("weight", tenant.weight), limits=merged)
    except InvalidTenant as error:
        raise bad_request(f"{error}.", param="limits", code="invalid_tenant") from None


def scopes_of(body: dict[str, Any]) -> tuple[Scope, ...]:
    wanted = body.get("scopes", ["invoke"])
    if not isinstance(wanted, list) or not wanted or not all(scope in SCOPES for scope in wanted):
        raise bad_request(f"'scopes' must be a list of {', '.join(SCOPES)}.", param="scopes")
    return tuple(scope for scope in SCOPES if scope in wanted)


def seconds_of(body: dict[str, Any], field: str, default: float) -> float:
    value = body.get(field, default)
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not 0 <= value <= MOST_SECONDS:
        raise bad_request(f"'{field}' must be a number of seconds from 0 to {MOST_SECONDS}.", param=field)
    return float(value)


def tenant_not_found(name: str) -> ApiError:
    return not_found(f"There is no tenant '{name}'.", code="tenant_not_found", param="name")


def tenant_object(tenant: Tenant) -> TenantObject:
    return {"object": "tenant", **tenant.to_dict()}  # type: ignore[typeddict-item,return-value]


def key_object(record: KeyRecord) -> KeyObject:
    return {
        "object": "api_key",
        "id": record.id,
        "tenant": record.tenant,
        "scopes": list(record.scopes),
        "created_at": record.created_at,
        "expires_at": record.expires_at,
    }
