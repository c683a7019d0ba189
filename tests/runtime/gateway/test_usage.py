"""Limits over all functions, prices and bills, through gateways that ask for keys."""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from stoker.coldstart.store import ObjectStore
from stoker.queue.broker import Broker
from stoker.queue.cluster import Cluster
from stoker.queue.records import Enqueued, JobState, NewJob, new_job_id
from stoker.runtime.gateway.quota import asked_for, duration, usd
from stoker.runtime.spec import FunctionSpec
from stoker.runtime.tenancy.billing_days import day_of
from stoker.runtime.tenancy.directory import Directory
from stoker.runtime.tenancy.ledger import Ledger
from stoker.runtime.tenancy.price import Quantities

from .conftest import Login
from .peers import Deploy, Task, error_of, make_key, worker


@pytest.fixture
async def books(redis: Redis, store: ObjectStore) -> AsyncIterator[Ledger]:
    """The one that a controller runs."""
    ledger = Ledger(redis, Directory(redis), store)
    task = asyncio.create_task(ledger.run())
    yield ledger
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def limited(root: httpx.AsyncClient, login: Login, tenant: str, **limits: float) -> httpx.AsyncClient:
    made = await make_key(root, tenant, "invoke")
    assert (await root.patch(f"/v1/tenants/{tenant}", json={"limits": limits})).status_code == 200
    return login(made["key"])


async def answer(task: Task) -> None:
    await task.done({"value": task.payload["input"]}, busy_ms=2000.0, prompt_tokens=10, completion_tokens=5)


async def usage_of(client: httpx.AsyncClient, jobs: int, **params: str) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 10
    while True:
        rows = (await client.get("/v1/usage", params=params)).json()["data"]
        if sum(row["jobs"] for row in rows) >= jobs or time.monotonic() > deadline:
            return rows
        await asyncio.sleep(0.05)


async def until_accepted(client: httpx.AsyncClient, function: str) -> None:
    """A place is given back soon after an answer."""
    async with asyncio.timeout(10):
        while (await client.post(f"/v1/functions/{function}/jobs", json=3)).status_code != 202:
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def priced(root: httpx.AsyncClient, function: str, **price: float) -> AsyncIterator[None]:
    assert (await root.put(f"/v1/prices/{function}", json=price)).status_code == 200
    yield
    assert (await root.delete(f"/v1/prices/{function}")).status_code == 200


async def test_two_hundred_requests_at_once_against_a_budget_of_ten(
    root: httpx.AsyncClient, login: Login, deploy: Deploy, broker: Broker, books: Ledger
) -> None:
    function, tenant = await deploy(), "budget"
    client = await limited(root, login, tenant, budget_usd=10)
    async with priced(root, function, request=1), worker(broker, function, answer):
        calls = [client.post(f"/v1/functions/{function}", json=1) for _ in range(200)]
        responses = await asyncio.gather(*calls)
        accepted = [response for response in responses if response.status_code == 200]
        refused = [response for response in responses if response.status_code == 429]
        assert (len(accepted), len(refused)) == (10, 190)
        assert {(error["type"], error["code"]) for error in map(error_of, refused)} == {
            ("insufficient_quota", "budget_exhausted")
        }
        rows = await usage_of(client, 10)
        assert [(row["function"], row["jobs"], row["cost_usd"]) for row in rows] == [(function, 10, 10.0)]
        assert (await client.post(f"/v1/functions/{function}", json=1)).status_code == 429


async def test_jobs_one_after_the_other_fit_a_concurrency_of_one(
    root: httpx.AsyncClient, login: Login, deploy: Deploy, broker: Broker
) -> None:
    function = await deploy()
    client = await limited(root, login, "serial", concurrency=1)
    async with worker(broker, function, answer):
        for number in range(20):
            assert (await client.post(f"/v1/functions/{function}", json=number)).json() == number
    waiting = await client.post(f"/v1/functions/{function}/jobs", json=1)
    refused = await client.post(f"/v1/functions/{function}/jobs", json=1)
    assert (waiting.status_code, refused.status_code) == (202, 429)
    assert "concurrency" in error_of(refused)["message"] and int(refused.headers["retry-after"]) >= 1


async def test_a_job_that_was_not_queued_gives_its_place_back(
    root: httpx.AsyncClient, login: Login, deploy: Deploy, broker: Broker
) -> None:
    function = await deploy()
    client = await limited(root, login, "keyed", concurrency=2)
    for body, status in ((1, 202), (1, 202), (2, 409), (1, 202), (2, 409)):
        headers = {"idempotency-key": "same"}
        response = await client.post(f"/v1/functions/{function}/jobs", json=body, headers=headers)
        assert response.status_code == status
    await until_accepted(client, function)
    assert (await client.post(f"/v1/functions/{function}/jobs", json=4)).status_code == 429


async def test_a_repeated_request_takes_no_place(
    root: httpx.AsyncClient, login: Login, deploy: Deploy, broker: Broker
) -> None:
    """Whoever lost the answer asks again, and gets it, also when the limits have room for no other job."""
    function, headers = await deploy(), {"idempotency-key": "lost"}
    client = await limited(root, login, "retrying", concurrency=1, requests_per_minute=2, budget_usd=1)
    async with priced(root, function, request=1):
        job = await client.post(f"/v1/functions/{function}/jobs", json=1, headers=headers)
        for _ in range(3):
            again = await client.post(f"/v1/functions/{function}/jobs", json=1, headers=headers)
            assert (again.status_code, again.json()["id"]) == (202, job.json()["id"])
        assert (await client.post(f"/v1/functions/{function}/jobs", json=2, headers=headers)).status_code == 409
        assert (await client.put(f"/v1/functions/{function}/jobs/own", json=2)).status_code == 429
        async with worker(broker, function, answer):
            assert (await client.post(f"/v1/functions/{function}", json=1, headers=headers)).json() == 1


async def test_a_client_that_leaves_while_its_job_is_queued_parts_it_from_no_limit(
    root: httpx.AsyncClient, login: Login, deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue has the job and its answer is on the way when the connection goes."""
    reached = Broker.enqueue

    async def slowly(broker: Broker, job: NewJob) -> Enqueued:
        enqueued = await reached(broker, job)
        await asyncio.sleep(0.5)
        return enqueued

    monkeypatch.setattr(Broker, "enqueue", slowly)
    function, client = await deploy(), await limited(root, login, "leaving", concurrency=1)
    with pytest.raises(httpx.ReadTimeout):
        await client.post(f"/v1/functions/{function}/jobs", json=1, timeout=httpx.Timeout(5, read=0.2))
    for _ in range(6):
        assert (await client.post(f"/v1/functions/{function}/jobs", json=1)).status_code == 429
        await asyncio.sleep(0.1)


async def test_a_replay_is_within_the_limits(
    root: httpx.AsyncClient, login: Login, deploy: Deploy, broker: Broker, books: Ledger
) -> None:
    async def fail(task: Task) -> None:
        await task.fail({"type": "internal_error", "message": "no"})

    function, other = await deploy(), await deploy()
    client = await limited(root, login, "again", concurrency=1)
    big = await client.post(f"/v1/functions/{function}/jobs", json="x" * 100_000)
    async with worker(broker, function, fail):
        await usage_of(client, 1)
    waiting = (await client.post(f"/v1/functions/{other}/jobs", json=1)).json()["id"]
    replay, headers = f"/v1/jobs/{big.json()['id']}/replay", {"idempotency-key": "k"}
    assert (await client.post(replay, headers=headers)).status_code == 429
    await client.delete(f"/v1/jobs/{waiting}")
    await usage_of(client, 2)
    for _ in range(3):
        assert (await client.post(replay, headers=headers)).json()["state"] == "queued"
    assert (await client.post(f"/v1/functions/{other}/jobs", json=1)).status_code == 429
    async with worker(broker, function, fail):
        await usage_of(client, 3)
    assert (await client.post(replay, headers=headers)).json()["state"] == "failed"
    await until_accepted(client, other)


async def test_a_deleted_functions_first_jobs_give_their_places_back(
    root: httpx.AsyncClient, login: Login, deploy: Deploy, broker: Broker, books: Ledger
) -> None:
    """Also one that came from a gateway that took the function for deployed a moment longer."""
    brief, other = await deploy(), await deploy()
    client = await limited(root, login, "brief", concurrency=1)
    assert (await client.post(f"/v1/functions/{brief}/jobs", json=1)).status_code == 202
    assert (await root.delete(f"/v1/functions/{brief}")).status_code == 200
    late = NewJob(id=new_job_id(brief), function=brief, tenant="brief", payload=b"")
    await broker.enqueue(late)
    deadline = time.monotonic() + 5
    while (await client.post(f"/v1/functions/{other}/jobs", json=1)).status_code == 429:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    while (job := await broker.job(late.id)) and job.state is not JobState.CANCELLED:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_requests_per_minute_hold_over_all_functions(
    root: httpx.AsyncClient, login: Login, deploy: Deploy
) -> None:
    client = await limited(root, login, "paced", requests_per_minute=3)
    statuses = [(await client.post(f"/v1/functions/{await deploy()}/jobs", json=1)).status_code for _ in range(5)]
    assert statuses == [202, 202, 202, 429, 429]


async def test_bills_are_for_their_tenant_and_the_operator(
    root: httpx.AsyncClient, login: Login, deploy: Deploy, broker: Broker, books: Ledger, cluster: Cluster
) -> None:
    shared, own = await deploy(), "payer.own"
    spec = FunctionSpec(name=own, kind="python", code="0" * 64, entry="m:f")
    await cluster.put_function(own, spec.to_dict())
    ann, bob = [login((await make_key(root, name, "invoke"))["key"]) for name in ("payer", "idler")]
    async with priced(root, shared, second=0.5, prompt_tokens=100), priced(root, own, request=2):
        async with worker(broker, shared, answer), worker(broker, own, answer):
            await ann.post(f"/v1/functions/{shared}", json=1)
            await ann.post("/v1/functions/own", json=1)
        rows = await usage_of(ann, 2)
        assert {row["function"]: row["cost_usd"] for row in rows} == {shared: 1.001, "own": 2.0}
        assert {(row["day"], row["tenant"]) for row in rows} == {(day_of(time.time()), "payer")}
        assert [(row["run_seconds"], row["prompt_tokens"], row["completion_tokens"]) for row in rows] == [
            (2.0, 10, 5)
        ] * 2
        assert (await usage_of(bob, 0)) == []
        assert (await bob.get("/v1/usage", params={"tenant": "payer"})).status_code == 403
        assert {row["function"] for row in await usage_of(root, 2, tenant="payer")} == {shared, "payer.own"}
        assert {row["tenant"] for row in await usage_of(root, 2, tenant="*")} >= {"payer"}
    await cluster.delete_function(own)


@pytest.mark.parametrize(
    "query", [{"from": "yesterday"}, {"to": "2026-02-30"}, {"from": "2020-01-01"}, {"to": "1999-01-01"}]
)
async def test_days_that_are_none_are_refused(root: httpx.AsyncClient, query: dict[str, str]) -> None:
    response = await root.get("/v1/usage", params=query)
    assert response.status_code == 400 and error_of(response)["param"] in ("from", "to")


async def test_prices_are_listed_and_checked(root: httpx.AsyncClient, deploy: Deploy) -> None:
    function = await deploy()
    async with priced(root, function, completion_tokens=2.5), priced(root, "*", second=0.001):
        listed = {row["function"]: row for row in (await root.get("/v1/prices")).json()["data"]}
        assert (listed[function]["completion_tokens"], listed["*"]["second"]) == (2.5, 0.001)
    assert (await root.put("/v1/prices/unknown", json={})).status_code == 404
    assert (await root.put(f"/v1/prices/{function}", json={"minute": 1})).status_code == 400
    assert (await root.delete(f"/v1/prices/{function}")).status_code == 404


def test_what_a_request_may_use_at_most() -> None:
    chat = {"kind": "generate", "prompt_ids": [1, 2, 3], "params": {"max_tokens": 10}}
    assert asked_for(chat) == Quantities(prompt_tokens=3, completion_tokens=10)
    assert asked_for({**chat, "params": {"max_tokens": 10, "n": 4}}) == Quantities(
        prompt_tokens=3, completion_tokens=40
    )
    assert asked_for({"kind": "embed", "texts": [[1, 2], [3]]}) == Quantities(prompt_tokens=3)
    assert asked_for({"kind": "call", "input": {"texts": [[1]], "prompt_ids": []}}) == Quantities(run_us=1_000_000)


async def test_a_budget_holds_for_calls_whose_cost_is_known_only_afterwards(
    root: httpx.AsyncClient, login: Login, deploy: Deploy, broker: Broker, books: Ledger
) -> None:
    """Each call turns out to run for a hundred times the second that is reserved of a function never called before."""
    function, tenant = await deploy(), "surprised"
    client = await limited(root, login, tenant, budget_usd=3.5)

    async def slow(task: Task) -> None:
        await task.done({"value": 1}, busy_ms=100_000.0)

    async with priced(root, function, second=0.01), worker(broker, function, slow):
        assert (await client.post(f"/v1/functions/{function}", json=1)).status_code == 200
        assert [row["cost_usd"] for row in await usage_of(client, 1)] == [1.0]
        await asyncio.sleep(1.1)
        calls = [client.post(f"/v1/functions/{function}", json=1) for _ in range(20)]
        statuses = [response.status_code for response in await asyncio.gather(*calls)]
        assert sorted(statuses) == [200] * 2 + [429] * 18


async def test_limits_are_told_on_every_answer_that_they_hold_for(
    root: httpx.AsyncClient, login: Login, deploy: Deploy, broker: Broker
) -> None:
    function = await deploy()
    client = await limited(root, login, "told", requests_per_minute=60)
    async with worker(broker, function, answer):
        whole = await client.post(f"/v1/functions/{function}", json=1)
        job = await client.post(f"/v1/functions/{function}/jobs", json=1)
        stream = await client.post(f"/v1/functions/{function}", json=1, headers={"accept": "text/event-stream"})
    told = [
        {name: response.headers[f"x-ratelimit-{name}-requests"] for name in ("limit", "remaining", "reset")}
        for response in (whole, job, stream)
    ]
    assert told[0]["limit"] == "60" and told[0]["remaining"] == "59" and re.fullmatch(r"1s|\d+ms", told[0]["reset"])
    assert [int(each["remaining"]) for each in told] == sorted((int(each["remaining"]) for each in told), reverse=True)
    assert "x-ratelimit-limit-tokens" not in whole.headers and int(whole.headers["openai-processing-ms"]) >= 0
    refused = (await limited(root, login, "told", requests_per_minute=0.5)).post(f"/v1/functions/{function}", json=1)
    answered = await refused
    assert answered.status_code == 429 and answered.headers["x-ratelimit-remaining-requests"] == "0"
    assert answered.headers["retry-after"]
    unlimited = await root.post(f"/v1/functions/{function}/jobs", json=1)
    assert not [name for name in unlimited.headers if name.startswith("x-ratelimit")]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.0121, "13ms"), (1, "1s"), (1.44, "1.5s"), (360, "6m0s"), (59.99, "1m0s")]
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("dollars", "text"), [(0.0002, "0.0002"), (1e-6, "0.000001"), (10, "10"), (0, "0")])
def test_dollars_are_told_to_the_millionth(dollars: float, text: str) -> None:
    assert usd(dollars) == text
