"""Waiting for a job's end on the routes of jobs."""

import asyncio
import time

import httpx
import pytest

from stoker.queue.broker import Broker
from stoker.queue.records import JobState
from stoker.runtime.gateway.job_end import wait_of

from .peers import Deploy, Task, double, until_state, worker

WAIT = {"prefer": "wait=10"}


async def test_a_job_is_put_and_waited_for_in_one_request(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    name = await deploy()
    async with worker(broker, name, double):
        first = await http.put(f"/v1/functions/{name}/jobs/a", json=4, headers=WAIT)
        again = await http.put(f"/v1/functions/{name}/jobs/a", json=4, headers=WAIT)
        posted = await http.post(f"/v1/functions/{name}/jobs", json=5, headers=WAIT)
    assert (first.status_code, first.json()["state"], first.json()["result"]) == (200, "succeeded", 8)
    assert again.json() == first.json() and again.headers["idempotency-replayed"] == "true"
    assert (posted.status_code, posted.json()["result"]) == (200, 10)


async def test_the_end_is_told_at_once(http: httpx.AsyncClient, broker: Broker, deploy: Deploy) -> None:
    name, release = await deploy(), asyncio.Event()

    async def slow(task: Task) -> None:
        await release.wait()
        await task.fail({"type": "function_error", "message": "no", "code": "ValueError", "traceback": None})

    job_id = (await http.post(f"/v1/functions/{name}/jobs", json=1)).json()["id"]
    async with worker(broker, name, slow):
        waiting = [asyncio.create_task(http.get(f"/v1/jobs/{job_id}", headers=WAIT)) for _ in range(3)]
        await until_state(broker, job_id, JobState.RUNNING)
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in waiting)
        release.set()
        released = time.monotonic()
        answers = [(await task).json() for task in waiting]
        assert time.monotonic() - released < 2
    assert {answer["state"] for answer in answers} == {"failed"}


async def test_patience_ends_before_the_job(http: httpx.AsyncClient, broker: Broker, deploy: Deploy) -> None:
    name = await deploy()
    put = await http.put(f"/v1/functions/{name}/jobs/a", json=4, headers={"prefer": "wait=1"})
    assert (put.status_code, put.json()["state"]) == (202, "queued")
    assert put.headers["preference-applied"] == "wait=1"
    job_id = put.json()["id"]
    got = await http.get(f"/v1/functions/{name}/jobs/a", headers={"prefer": "wait=1"})
    assert (got.status_code, got.json()["state"]) == (200, "queued")
    async with worker(broker, name, double):
        await until_state(broker, job_id, JobState.SUCCEEDED)


@pytest.mark.parametrize(
    ("prefer", "seconds"),
    [
        ("", None),
        ("wait=10", 10.0),
        ("Wait = 2.5", 2.5),
        ('wait="10"', 10.0),
        ("respond-async", 0.0),
        ("respond-async, wait=5", 5.0),
        ("wait=5;foo=bar, respond-async", 5.0),
        ("handling=lenient, wait=0", 0.0),
        ("wait=3, wait=4", 3.0),
        ("wait=1e400", None),
        ("wait=1e400, respond-async", 0.0),
        ("wait=10s", None),
        ("wait=-1", None),
        ("wait=", None),
        ("wait", None),
        ("wait=9999999999", None),
        ("wait=inf", None),
        ("await=7", None),
        ("x-respond-async", None),
        ("respond-async=no", None),
        ("wait=\u00b2", None),
    ],
)
def test_preferences_that_are_not_understood_are_as_if_they_were_not_there(prefer: str, seconds: float | None) -> None:
    assert wait_of(prefer) == seconds
