"""Deployments of one app at the same time, through several gateways: the last one stands, and all of it."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from stoker.queue import keys

from .conftest import RunningGateway
from .peers import write_bundle

ROUNDS = 12
EACH = 3
PARTS = {1: ("ra", "rb"), 2: ("ra", "rc"), 3: ("rb", "rc", "rd")}


@pytest.fixture
async def code(http: httpx.AsyncClient, tmp_path: Path) -> AsyncIterator[str]:
    data = write_bundle(tmp_path)
    digest = hashlib.sha256(data).hexdigest()
    await http.put(f"/v1/bundles/{digest}", content=data)
    yield digest
    for each in (await http.get("/v1/functions")).json()["data"]:
        if each["spec"]["app"].startswith("race"):
            await http.delete(f"/v1/functions/{each['name']}")


def function(code: str, number: int, **fields: Any) -> dict[str, Any]:
    shared = {"kind": "python", "code": code, "entry": "m:f", "limits": {"max_queued": 1000 + number}}
    return {**shared, "concurrency": number, **fields}


def whole(code: str, number: int) -> dict[str, Any]:
    return {"functions": [function(code, number, name=name) for name in PARTS[number]]}


async def deployed(http: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    functions = (await http.get("/v1/functions")).json()["data"]
    return {each["name"]: each["spec"] for each in functions if each["spec"]["app"] == "race"}


async def answered(request: Any) -> httpx.Response:
    response = await request
    assert response.status_code in (200, 201), response.text
    return response


async def test_versions_of_an_app_never_mix(
    http: httpx.AsyncClient, second_gateway: RunningGateway, code: str, redis: Redis
) -> None:
    async with httpx.AsyncClient(base_url=second_gateway.url, timeout=60) as other:
        gateways = [http, other]
        versions = {
            (await answered(http.put("/v1/apps/race", json=whole(code, number)))).json()["version"]: number
            for number in PARTS
        }
        won: Counter[int] = Counter()
        for _ in range(ROUNDS):
            puts = [
                answered(gateways[(turn + number) % 2].put("/v1/apps/race", json=whole(code, number)))
                for turn in range(EACH)
                for number in PARTS
            ]
            backs = [
                answered(gateway.post("/v1/apps/race/rollback", json={"version": version}))
                for gateway, version in zip(gateways, versions, strict=False)
            ]
            await asyncio.gather(*puts, *backs)
            now = await deployed(http)
            (winner,) = {spec["concurrency"] for spec in now.values()}
            assert set(now) == set(PARTS[winner])
            rows = (await http.get("/v1/apps/race/versions")).json()["data"]
            assert [versions[row["version"]] for row in rows if row["current"]] == [winner]
            assert len(rows) == len(PARTS)
            for name in now:
                assert await redis.hget(keys.meta(name), "limit") == str(1000 + winner).encode()  # type: ignore[misc]
            won[winner] += 1
        assert (await http.put("/v1/apps/race", json=whole(code, 1))).json()["version"] in versions


async def test_single_functions_join_their_app_side_by_side(
    http: httpx.AsyncClient, second_gateway: RunningGateway, code: str
) -> None:
    names = [f"part{number}" for number in range(10)]
    async with httpx.AsyncClient(base_url=second_gateway.url, timeout=60) as other:
        await asyncio.gather(
            *(
                answered(gateway.put(f"/v1/functions/{name}", json={"spec": function(code, 1, app="race2")}))
                for name, gateway in zip(names, [http, other] * 5, strict=True)
            )
        )
        rows = (await other.get("/v1/apps/race2/versions")).json()["data"]
    (current,) = [row for row in rows if row["current"]]
    assert sorted(each["name"] for each in current["functions"]) == names


async def test_one_name_goes_to_one_of_two_apps(
    http: httpx.AsyncClient, second_gateway: RunningGateway, code: str
) -> None:
    async with httpx.AsyncClient(base_url=second_gateway.url, timeout=60) as other:
        for turn in range(6):
            body = {"functions": [function(code, 1, name=f"claimed{turn}")]}
            answers = await asyncio.gather(
                *(client.put(f"/v1/apps/race{app}x{turn}", json=body) for app, client in enumerate((http, other)))
            )
            assert sorted(answer.status_code for answer in answers) == [200, 409], [each.text for each in answers]
