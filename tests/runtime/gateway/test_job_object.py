"""What a job's object says about its attempts and its cost."""

import asyncio

import httpx
import pytest

from stoker.queue.broker import Broker
from stoker.queue.records import Claim, Completion, Failure, Metered, pack

from .peers import PATIENCE_S, Deploy
from .test_job_routes import queue_job


async def claim(broker: Broker, name: str, worker: str) -> Claim:
    async with asyncio.timeout(PATIENCE_S):
        while not (claims := await broker.claim(name, worker, 1)):
            await asyncio.sleep(0.01)
    return claims[0]


async def read(http: httpx.AsyncClient, job_id: str) -> dict:
    return (await http.get(f"/v1/jobs/{job_id}")).json()


def seen(job: dict) -> list[tuple]:
    return [(each["number"], each["worker"], each["ended"], each["error"]) for each in job["attempts"]]


async def test_attempts_of_a_job_that_succeeds_in_the_end(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    name = await deploy()
    job_id = await queue_job(http, name)
    assert (await read(http, job_id))["attempts"] == []
    first = await claim(broker, name, "w1")
    assert seen(await read(http, job_id)) == [(1, "w1", "running", None)]
    error = pack({"type": "internal_error", "message": "out of luck"})
    await broker.fail(name, [Failure(first.job_id, first.fence, error, retry=True, usage=pack({"busy_ms": 5}))])
    assert seen(await read(http, job_id)) == [(1, "w1", "failed", "out of luck")]
    back = await claim(broker, name, "w2")
    await broker.fail(name, [Failure(back.job_id, back.fence, b"", retry=True, counts=False)])
    last = await claim(broker, name, "w3")
    done = Completion(last.job_id, last.fence, pack({"value": 1}), pack({"busy_ms": 2}))
    await broker.done(name, [done])
    job = await read(http, job_id)
    assert seen(job) == [
        (1, "w1", "failed", "out of luck"),
        (2, "w2", "handed_back", None),
        (2, "w3", "succeeded", None),
    ]
    assert [each["usage"] for each in job["attempts"]] == [{"busy_ms": 5}, None, {"busy_ms": 2}]
    times = [time for each in job["attempts"] for time in (each["started_at"], each["ended_at"])]
    assert times == sorted(times) and times[-1] == job["finished_at"]


async def test_a_worker_lost_and_a_cancel_while_it_waits(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    name = await deploy()
    job_id, short = await queue_job(http, name), Broker(broker._redis, lease_ms=10)
    await short.claim(name, "gone", 1)
    await asyncio.sleep(0.05)
    await broker.tick(name)
    await http.delete(f"/v1/jobs/{job_id}")
    job = await read(http, job_id)
    assert (job["state"], seen(job)) == ("cancelled", [(1, "gone", "lost", None)])


async def test_the_last_attempt_may_be_the_lost_one(http: httpx.AsyncClient, broker: Broker, deploy: Deploy) -> None:
    name = await deploy()
    job_id, short = await queue_job(http, name), Broker(broker._redis, lease_ms=10)
    for number in range(3):
        await short.claim(name, f"w{number}", 1)
        await asyncio.sleep(0.05)
        await broker.tick(name)
    job = await read(http, job_id)
    assert job["state"] == "dead"
    assert [(each["number"], each["worker"], each["ended"]) for each in job["attempts"]] == [
        (1, "w0", "lost"),
        (2, "w1", "lost"),
        (3, "w2", "lost"),
    ]


async def test_costs_are_the_ledgers(http: httpx.AsyncClient, broker: Broker, deploy: Deploy) -> None:
    name = await deploy()
    price = {"request": 0.001, "second": 0.5, "prompt_tokens": 2.0}
    assert (await http.put(f"/v1/prices/{name}", json=price)).status_code == 200
    usage = pack({"busy_ms": 100.0, "prompt_tokens": 1000})
    done, failed, stopped, never = [await queue_job(http, name) for _ in range(4)]
    assert (await read(http, done))["cost_usd"] is None
    claims = {each.job_id: each for each in [await claim(broker, name, "w") for _ in range(3)]}
    await broker.done(name, [Completion(done, claims[done].fence, pack({"value": 1}), usage)])
    await broker.fail(name, [Failure(failed, claims[failed].fence, pack({"message": "x"}), retry=False, usage=usage)])
    await http.delete(f"/v1/jobs/{stopped}")
    assert (await read(http, stopped))["cost_usd"] == 0.0
    await broker.meter(name, [Metered(stopped, claims[stopped].fence, usage)])
    await http.delete(f"/v1/jobs/{never}")
    costs = [(await read(http, each))["cost_usd"] for each in (done, failed, stopped, never)]
    assert costs == [0.053, 0.0, 0.053, 0.0]


async def test_a_timeline_has_the_attempts_that_led_to_the_last_one(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    """Each with its wait; what an attempt of another version only kept is part of the wait."""
    name = await deploy()
    job_id = await queue_job(http, name)
    await asyncio.sleep(0.05)
    first = await claim(broker, name, "w1")
    await asyncio.sleep(0.1)
    await broker.fail(name, [Failure(first.job_id, first.fence, b"", retry=True, counts=False)])
    waits = await read(http, job_id)
    assert (waits["state"], waits["started_at"], waits["timeline"]) == ("retrying", None, [])
    kept = await claim(broker, name, "w2")
    await broker.set_aside(name, {job_id: kept.fence})
    await asyncio.sleep(0.1)
    await broker.fail(name, [Failure(job_id, kept.fence, b"", retry=True, counts=False)])
    last = await claim(broker, name, "w3")
    assert last.since_ms == kept.since_ms and last.claimed_ms - last.since_ms >= 100
    own = [
        {"name": "queue wait", "start_ns": 0, "end_ns": (last.claimed_ms - last.since_ms) * 1_000_000},
        {"name": "run", "start_ns": (last.claimed_ms - last.since_ms) * 1_000_000, "end_ns": 10**9},
    ]
    notes = pack({"timeline": own, "since_ms": last.since_ms})
    await broker.done(name, [Completion(job_id, last.fence, pack({"value": 1}), pack({}), notes)])
    job = await read(http, job_id)
    phases = job["timeline"]
    assert [each["name"] for each in phases] == ["queue wait", "attempt 1: handed back", "queue wait", "run"]
    ends = [round(each["start_s"] + each["seconds"], 6) for each in phases]
    assert [round(each["start_s"], 6) for each in phases] == [0, *ends[:-1]]
    assert phases[0]["seconds"] >= 0.05 and phases[1]["seconds"] >= 0.1 and phases[2]["seconds"] >= 0.1
    assert job["started_at"] == pytest.approx(job["enqueued_at"] + phases[3]["start_s"])


async def test_nothing_runs_while_a_job_waits_for_its_next_attempt(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    name = await deploy()
    job_id = await queue_job(http, name)
    first = await claim(broker, name, "w1")
    await broker.fail(name, [Failure(job_id, first.fence, pack({"message": "x"}), retry=True)])
    (listed,) = (await http.get("/v1/jobs", params={"function": name})).json()["data"]
    assert (listed["state"], listed["started_at"]) == ("retrying", None)
