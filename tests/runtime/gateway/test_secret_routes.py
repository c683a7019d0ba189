"""Secrets of functions over HTTP: each owner's own, encrypted in Redis, shown to nobody."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from stoker.runtime.gateway.settings import GatewaySettings
from stoker.runtime.tenancy.api_key import Keyring
from stoker.runtime.tenancy.vault import VALUES, SecretUnreadable, Vault

from .conftest import SECRET, RunningGateway, running
from .peers import error_of, make_key, write_bundle

VALUE = "hf_0123456789 not to be seen"


@pytest.fixture(scope="module")
def guarded(settings: GatewaySettings) -> Iterator[RunningGateway]:
    with running(replace(settings, keys_secret=SECRET, secret=SECRET, gateway_id="gateway-guarded")) as gateway:
        yield gateway


def client_of(gateway: RunningGateway, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=gateway.url, headers={"authorization": f"Bearer {key}"}, timeout=20)


@pytest.fixture
async def operator(guarded: RunningGateway) -> Any:
    async with client_of(guarded, Keyring(SECRET).root_text()) as client:
        yield client
        for row in (await client.get("/v1/secrets")).json()["data"]:
            await client.delete(f"/v1/secrets/{row['name']}")
        for row in (await client.get("/v1/tenants")).json()["data"]:
            await client.delete(f"/v1/tenants/{row['name']}")


@pytest.fixture
async def tenant(guarded: RunningGateway, operator: httpx.AsyncClient) -> Any:
    key = (await make_key(operator, "shop", "invoke", "deploy"))["key"]
    async with client_of(guarded, key) as client:
        yield client


async def test_a_secret_is_stored_listed_and_deleted_but_not_shown(tenant: httpx.AsyncClient, redis: Redis) -> None:
    put = await tenant.put("/v1/secrets/hf-token", json={"value": VALUE})
    again = await tenant.put("/v1/secrets/hf-token", json={"value": VALUE + "2"})
    assert [put.status_code, again.status_code] == [201, 200]
    listed = await tenant.get("/v1/secrets")
    (row,) = listed.json()["data"]
    assert (row["name"], row["variable"]) == ("hf-token", "HF_TOKEN") and row["set_at"] > 0
    assert not any("hf_0123" in answer.text for answer in (put, again, listed))
    stored = await redis.hgetall(VALUES)
    assert stored and not any(b"hf_0123" in value for value in stored.values())
    assert await Vault(redis, SECRET).values("shop", ("hf-token",)) == {"hf-token": VALUE + "2"}
    assert (await tenant.get("/v1/secrets/hf-token")).status_code == 405
    assert (await tenant.delete("/v1/secrets/hf-token")).status_code == 200
    gone = await tenant.delete("/v1/secrets/hf-token")
    assert (gone.status_code, error_of(gone)["code"]) == (404, "secret_not_found")


async def test_each_owner_has_its_own(tenant: httpx.AsyncClient, operator: httpx.AsyncClient) -> None:
    await operator.put("/v1/secrets/token", json={"value": "the operator's"})
    assert (await tenant.get("/v1/secrets")).json()["data"] == []
    assert (await tenant.delete("/v1/secrets/token")).status_code == 404
    await tenant.put("/v1/secrets/token", json={"value": "the tenant's"})
    assert len((await operator.get("/v1/secrets")).json()["data"]) == 1


async def test_a_deployment_names_what_is_not_there(
    tenant: httpx.AsyncClient, operator: httpx.AsyncClient, tmp_path: Any
) -> None:
    bundle = write_bundle(tmp_path)
    from hashlib import sha256

    digest = sha256(bundle).hexdigest()
    assert (await tenant.put(f"/v1/bundles/{digest}", content=bundle)).status_code == 201
    await operator.put("/v1/secrets/hf-token", json={"value": "the operator's, which is no tenant's"})
    spec = {"kind": "python", "entry": "m:f", "code": digest, "secrets": ["hf-token"]}
    refused = await tenant.put("/v1/functions/reader", json={"spec": spec})
    error = error_of(refused)
    assert (refused.status_code, error["code"], error["param"]) == (400, "secret_not_found", "spec.secrets")
    assert "`stoker secrets set hf-token`" in error["message"]
    await tenant.put("/v1/secrets/hf-token", json={"value": VALUE})
    assert (await tenant.put("/v1/functions/reader", json={"spec": spec})).status_code == 201
    kept = await tenant.delete("/v1/secrets/hf-token")
    assert (kept.status_code, error_of(kept)["code"]) == (409, "secret_in_use") and "reader" in kept.text
    assert (await tenant.delete("/v1/functions/reader")).status_code == 200
    assert (await tenant.delete("/v1/secrets/hf-token")).status_code == 200


async def test_it_needs_the_scope_of_who_deploys(guarded: RunningGateway, operator: httpx.AsyncClient) -> None:
    key = (await make_key(operator, "caller", "invoke"))["key"]
    async with client_of(guarded, key) as caller:
        for response in (await caller.get("/v1/secrets"), await caller.put("/v1/secrets/a", json={"value": "x"})):
            assert response.status_code == 403


@pytest.mark.parametrize(
    ("name", "body", "param"),
    [
        ("UPPER", {"value": "x"}, "name"),
        ("stoker-url", {"value": "x"}, "name"),
        ("a", {"value": ""}, "value"),
        ("a", {"value": 3}, "value"),
        ("a", {}, "value"),
        ("a", {"value": "x\0"}, "value"),
        ("a", {"value": "x" * 40_000}, "value"),
    ],
)
async def test_what_can_not_be_a_secret_is_400(tenant: httpx.AsyncClient, name: str, body: Any, param: str) -> None:
    response = await tenant.put(f"/v1/secrets/{name}", json=body)
    assert (response.status_code, error_of(response)["param"]) == (400, param)


async def test_a_gateway_without_a_secret_of_its_own_stores_none(http: httpx.AsyncClient) -> None:
    response = await http.put("/v1/secrets/a", json={"value": "x"})
    assert (response.status_code, error_of(response)["code"]) == (409, "no_deployment_secret")
    assert "STOKER_SECRET" in error_of(response)["message"]


async def test_a_removed_tenants_secrets_are_gone(
    tenant: httpx.AsyncClient, operator: httpx.AsyncClient, redis: Redis
) -> None:
    await tenant.put("/v1/secrets/token", json={"value": VALUE})
    assert (await operator.delete("/v1/tenants/shop")).status_code == 200
    assert await Vault(redis, SECRET).names("shop") == {}


async def test_values_can_not_be_moved_or_read_with_another_secret(tenant: httpx.AsyncClient, redis: Redis) -> None:
    await tenant.put("/v1/secrets/token", json={"value": VALUE})
    await redis.hset(VALUES, "thief.token", await redis.hget(VALUES, "shop.token"))  # type: ignore[misc,arg-type]
    with pytest.raises(SecretUnreadable, match="another STOKER_SECRET"):
        await Vault(redis, SECRET).values("thief", ("token",))
    with pytest.raises(SecretUnreadable, match="another STOKER_SECRET"):
        await Vault(redis, "some other deployment's secret").values("shop", ("token",))
    with pytest.raises(SecretUnreadable, match="set STOKER_SECRET"):
        await Vault(redis, "").values("shop", ("token",))
    with pytest.raises(SecretUnreadable, match="no secret 'other' any more"):
        await Vault(redis, SECRET).values("shop", ("other",))
    await redis.hdel(VALUES, "thief.token")  # type: ignore[misc]
