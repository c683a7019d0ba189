"""Logs over HTTP: which lines are given, how they are followed, and to whom."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import httpx
import pytest
from redis.asyncio import Redis

from stoker.queue.broker import Broker
from stoker.queue.cluster import Cluster
from stoker.runtime.gateway.auth import FRESH_S
from stoker.runtime.gateway.log_routes import since_ms
from stoker.runtime.gateway.settings import GatewaySettings
from stoker.runtime.logs.line import Line
from stoker.runtime.logs.log_book import LogBook
from stoker.runtime.spec import FunctionSpec

from .conftest import Login, RunningGateway
from .peers import Deploy, ServerEvent, error_of, make_key, server_events


@pytest.fixture
def book(redis: Redis) -> LogBook:
    return LogBook(redis)


def lines(*texts: str, job: str = "", replica: str = "r-1") -> list[Line]:
    return [Line(replica, "stdout", text, job) for text in texts]


def texts(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return [line["text"] for line in response.json()["data"]]


async def test_lines_by_job_replica_time_and_number(http: httpx.AsyncClient, deploy: Deploy, book: LogBook) -> None:
    name = await deploy()
    path = f"/v1/functions/{name}/logs"
    assert (await http.get(path)).json() == {"object": "list", "data": [], "has_more": False}
    await book.append(name, [*lines("a", job="j1"), *lines("b", job="j2"), *lines("c", replica="r-2")])
    await asyncio.sleep(0.01)
    between = time.time()
    await asyncio.sleep(0.01)
    await book.append(name, [Line("r-1", "stoker", "stopped")])
    assert texts(await http.get(path)) == ["a", "b", "c", "stopped"]
    assert texts(await http.get(path, params={"job": "j2"})) == ["b"]
    assert texts(await http.get(path, params={"replica": "r-2"})) == ["c"]
    assert texts(await http.get(path, params={"since": f"{between:.3f}"})) == ["stopped"]
    assert texts(await http.get(path, params={"since": "1h", "replica": "r-1"})) == ["a", "b", "stopped"]
    page = (await http.get(path, params={"limit": 2})).json()
    assert page["has_more"] and [line["text"] for line in page["data"]] == ["c", "stopped"]
    said = page["data"][1]
    assert (said["stream"], said["job"], said["replica"]) == ("stoker", None, "r-1")
    assert abs(said["at"] - time.time()) < 5 and said["id"].startswith(str(int(said["at"] * 1000))[:10])


@pytest.mark.parametrize("follow", ["true", "false"])
async def test_a_job_that_a_function_never_had_is_no_empty_log(
    http: httpx.AsyncClient, deploy: Deploy, follow: str
) -> None:
    name, other = await deploy(), await deploy()
    mine, its = [(await http.post(f"/v1/functions/{f}/jobs", json=1)).json()["id"] for f in (name, other)]
    path = f"/v1/functions/{name}/logs"
    assert texts(await http.get(path, params={"job": mine})) == []
    for job in ("NOSUCH", its, f"{name}-00000000001111111111111111"):
        answer = await http.get(path, params={"job": job, "follow": follow})
        assert answer.status_code == 404 and job in answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == "job_not_found"


@pytest.mark.parametrize(("text", "ms"), [("", 0), ("10m", 400_000), ("90s", 910_000), ("1d", 0), ("12.5", 12_500)])
def test_since_is_ago_or_a_time(text: str, ms: int) -> None:
    assert since_ms(text, now=1000.0) == ms


@pytest.mark.parametrize("query", ["since=yesterday", "since=-5m", "follow=maybe", "limit=0", "limit=9999999"])
async def test_what_can_not_be_asked(http: httpx.AsyncClient, deploy: Deploy, query: str) -> None:
    response = await http.get(f"/v1/functions/{await deploy()}/logs?{query}")
    assert response.status_code == 400 and error_of(response)["param"] == query.partition("=")[0]


async def test_a_log_is_followed_and_resumed(http: httpx.AsyncClient, deploy: Deploy, book: LogBook) -> None:
    name = await deploy()
    path = f"/v1/functions/{name}/logs?follow=true"
    await book.append(name, lines("old"))
    seen: list[ServerEvent] = []
    async with asyncio.timeout(10), http.stream("GET", path) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async for event in server_events(response):
            if event.comment:
                continue
            seen.append(event)
            if len(seen) == 1:
                await book.append(name, lines("new", "newer"))
            if len(seen) == 3:
                break
    assert ['"text":"old"' in seen[0].data, '"text":"newer"' in seen[2].data] == [True, True]
    headers = {"last-event-id": seen[1].id}
    async with asyncio.timeout(10), http.stream("GET", path, headers=headers) as response:
        resumed = await anext(event async for event in server_events(response) if not event.comment)
    assert resumed == seen[2]


async def test_who_follows_does_not_keep_a_gateway_from_stopping(
    settings: GatewaySettings, deploy: Deploy, book: LogBook
) -> None:
    name = await deploy()
    await book.append(name, lines("a"))
    gateway = RunningGateway(replace(settings, gateway_id="gateway-leaving"))
    await asyncio.to_thread(gateway.start)
    events: list[ServerEvent] = []
    async with asyncio.timeout(10), httpx.AsyncClient(base_url=gateway.url) as client:
        async with client.stream("GET", f"/v1/functions/{name}/logs?follow=true") as response:
            async for event in server_events(response):
                if not events:
                    stopping = asyncio.create_task(asyncio.to_thread(gateway.stop))
                events.append(event)
        await stopping
    assert [event.name for event in events if event.data] == [""], "it breaks off without an end"


async def test_a_job_s_log_ends_with_the_job(
    http: httpx.AsyncClient, deploy: Deploy, book: LogBook, broker: Broker
) -> None:
    name = await deploy()
    job = (await http.post(f"/v1/functions/{name}/jobs", json=1)).json()["id"]
    await book.append(name, [*lines("mine", job=job), *lines("another's", job="other")])
    assert texts(await http.get(f"/v1/jobs/{job}/logs")) == ["mine"]
    events: list[ServerEvent] = []
    async with asyncio.timeout(10), http.stream("GET", f"/v1/jobs/{job}/logs?follow=1") as response:
        async for event in server_events(response):
            events.append(event)
            if len([event for event in events if event.data]) == 1 and not event.comment:
                await book.append(name, lines("last words", job=job))
                await http.delete(f"/v1/jobs/{job}")
    said = [event for event in events if event.data]
    assert ['"mine"' in said[0].data, '"last words"' in said[1].data, said[2].name] == [True, True, "end"]


async def test_a_log_is_its_owner_s_alone(
    root: httpx.AsyncClient, login: Login, cluster: Cluster, book: LogBook
) -> None:
    owner, other = [login((await make_key(root, name, "invoke"))["key"]) for name in ("owner", "other")]
    for full in ("owner.mine", "shared"):
        spec = FunctionSpec(name=full, kind="python", code="0" * 64, entry="m:f")
        await cluster.put_function(full, spec.to_dict())
    try:
        await book.append("owner.mine", lines("secret"))
        await book.append("shared", lines("secret"))
        assert texts(await owner.get("/v1/functions/mine/logs")) == ["secret"]
        assert texts(await root.get("/v1/functions/shared/logs")) == ["secret"]
        assert texts(await root.get("/v1/functions/owner.mine/logs")) == ["secret"]
        for client, path in [
            (other, "/v1/functions/mine/logs"),
            (root, "/v1/functions/mine/logs"),
            (root, "/v1/functions/owner.nosuch/logs"),
            (owner, "/v1/functions/owner.mine/logs"),
            (other, "/v1/functions/owner.mine/logs"),
            (owner, "/v1/functions/shared/logs"),
        ]:
            for query in ("", "?follow=true"):
                error = error_of(answer := await client.get(path + query))
                assert answer.status_code == 404
                assert ("is for the function's owner" in error["message"]) == ("shared" in path)
        mine, of_shared = [
            (await owner.post(f"/v1/functions/{name}/jobs", json=1)).json()["id"] for name in ("mine", "shared")
        ]
        assert texts(await owner.get(f"/v1/jobs/{mine}/logs")) == []
        assert texts(await root.get(f"/v1/jobs/{mine}/logs")) == []
        refused: list[tuple[httpx.AsyncClient, str]] = [(other, mine), (owner, of_shared)]
        for client, job in refused:
            assert (await client.get(f"/v1/jobs/{job}/logs")).status_code == 404
    finally:
        for full in ("owner.mine", "shared"):
            await cluster.delete_function(full)


async def test_the_operator_lists_tenants_functions_by_their_full_names(
    root: httpx.AsyncClient, login: Login, cluster: Cluster
) -> None:
    owner, other = [login((await make_key(root, name, "invoke"))["key"]) for name in ("owner", "other")]
    plain = login((await make_key(root, "operator", "invoke"))["key"])
    for full in ("owner.mine", "shared"):
        await cluster.put_function(full, FunctionSpec(name=full, kind="python", code="0" * 64, entry="m:f").to_dict())
    try:
        listed = {
            name: {row["name"]: row["owner"] for row in (await client.get("/v1/functions")).json()["data"]}
            for name, client in {"root": root, "owner": owner, "other": other, "plain": plain}.items()
        }
        assert listed["owner"] == {"mine": "owner", "shared": ""} and listed["other"] == {"shared": ""}
        assert listed["root"] == {"owner.mine": "owner", "shared": ""} and listed["plain"] == {"shared": ""}
        assert (await plain.get("/v1/functions/owner.mine/logs")).status_code == 404
    finally:
        for full in ("owner.mine", "shared"):
            await cluster.delete_function(full)


async def followed_until_cut(
    client: httpx.AsyncClient, path: str, cut: Callable[[], Awaitable[None]]
) -> list[ServerEvent]:
    """What a follower gets that has seen one line when `cut` happens, until its stream ends."""
    events: list[ServerEvent] = []
    async with asyncio.timeout(15), client.stream("GET", path) as response:
        async for event in server_events(response):
            if event.comment:
                continue
            events.append(event)
            if len(events) == 1:
                await cut()
    return events


@pytest.mark.parametrize("way", ["tenant", "key", "function"])
async def test_who_follows_sees_nothing_of_the_next_owner(
    root: httpx.AsyncClient, login: Login, cluster: Cluster, book: LogBook, redis: Redis, way: str
) -> None:
    """Neither its function's nor a job's log; the lines are there before the gateway can look again."""
    made = await make_key(root, "acme", "invoke")
    owner, full = login(made["key"]), "acme.mine"
    spec = FunctionSpec(name=full, kind="python", code="0" * 64, entry="m:f", born="first")
    await cluster.put_function(full, spec.to_dict())
    await book.append(full, lines("mine"))

    async def cut() -> None:
        if way == "key":
            await root.delete(f"/v1/tenants/acme/keys/{made['id']}")
            await asyncio.sleep(FRESH_S)
        if way == "tenant":
            await root.delete("/v1/tenants/acme")
            await make_key(root, "acme", "invoke")
        if way != "key":
            await cluster.put_function(full, replace(spec, born="second").to_dict())
        await book.append(full, lines("the next owner's"))

    try:
        events = await followed_until_cut(owner, "/v1/functions/mine/logs?follow=true", cut)
    finally:
        await cluster.delete_function(full)
        await redis.delete(f"stoker:log:{{{full}}}")
    assert '"mine"' in events[0].data and "next owner" not in "".join(event.data for event in events)
    assert len(events) == 2 and events[1].name in (("error",) if way == "key" else ("end", "error"))
    if events[1].name == "error":
        assert json.loads(events[1].data)["error"]["code"] == "invalid_api_key"


async def test_a_job_s_log_ends_when_its_key_is_revoked(
    root: httpx.AsyncClient, login: Login, cluster: Cluster, book: LogBook, redis: Redis
) -> None:
    made = await make_key(root, "acme", "invoke")
    owner, full = login(made["key"]), "acme.mine"
    await cluster.put_function(full, FunctionSpec(name=full, kind="python", code="0" * 64, entry="m:f").to_dict())
    try:
        job = (await owner.post("/v1/functions/mine/jobs", json=1)).json()["id"]
        await book.append(full, lines("mine", job=job))

        async def cut() -> None:
            await root.delete(f"/v1/tenants/acme/keys/{made['id']}")

        events = await followed_until_cut(owner, f"/v1/jobs/{job}/logs?follow=true", cut)
    finally:
        await cluster.delete_function(full)
        await redis.delete(f"stoker:log:{{{full}}}")
    assert [event.name for event in events] == ["", "error"]


async def test_a_log_that_is_followed_ends_with_its_function(
    http: httpx.AsyncClient, deploy: Deploy, book: LogBook
) -> None:
    name = await deploy()
    await book.append(name, lines("a"))

    async def cut() -> None:
        assert (await http.delete(f"/v1/functions/{name}")).status_code == 200

    events = await followed_until_cut(http, f"/v1/functions/{name}/logs?follow=true", cut)
    assert [event.name for event in events] == ["", "end"]


@pytest.mark.parametrize("id", ["999999999999999999-99999999999999999999", "1-", "x", "1"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_a_last_event_id_that_is_none(http: httpx.AsyncClient, deploy: Deploy, id: str, method: str) -> None:
    name = await deploy()
    path, headers = f"/v1/functions/{name}/logs?follow=true", {"last-event-id": id}
    assert (await http.request(method, path, headers=headers)).status_code == 400
    job = (await http.post(f"/v1/functions/{name}/jobs", json=1)).json()["id"]
    assert (await http.get(f"/v1/jobs/{job}/events", headers=headers)).status_code == 400


async def test_head_of_a_stream_answers_at_once(http: httpx.AsyncClient, deploy: Deploy, book: LogBook) -> None:
    name = await deploy()
    await book.append(name, lines("a"))
    job = (await http.post(f"/v1/functions/{name}/jobs", json=1)).json()["id"]
    for path in (f"/v1/functions/{name}/logs", f"/v1/jobs/{job}/logs"):
        answer = await http.head(path, params={"follow": "true"}, timeout=5)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    assert (await http.head(f"/v1/jobs/{job}/events", timeout=5)).status_code == 405


async def test_the_log_goes_with_its_function(
    http: httpx.AsyncClient, deploy: Deploy, book: LogBook, redis: Redis
) -> None:
    name = await deploy()
    await book.append(name, lines("a"))
    assert (await http.delete(f"/v1/functions/{name}")).status_code == 200
    assert not await redis.exists(f"stoker:log:{{{name}}}")
