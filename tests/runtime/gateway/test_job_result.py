"""A job's result alone: inline, or read where it is stored."""

from collections.abc import Iterator
from dataclasses import replace

import httpx
import msgpack
import numpy as np
import pytest

from stoker.coldstart.store import ObjectStore, open_store
from stoker.queue.broker import Broker
from stoker.queue.deliveries import Delivery
from stoker.queue.records import Claim, Completion, JobState, pack
from stoker.runtime import payloads
from stoker.runtime.arrays import opened, to_ext
from stoker.runtime.gateway.settings import GatewaySettings
from stoker.runtime.gateway.webhook_body import event_body

from .conftest import RunningGateway, running
from .peers import Deploy, Task, error_of, until_state, worker

MSGPACK = {"accept": "application/msgpack"}
BIG = np.arange(50_000, dtype=np.int64)


@pytest.fixture
def bucket(s3_endpoint: str) -> ObjectStore:
    return open_store("s3://models/results")


@pytest.fixture
def over_s3(settings: GatewaySettings, bucket: ObjectStore) -> Iterator[RunningGateway]:
    with running(replace(settings, store_url=bucket.url, gateway_id="gateway-s3")) as gateway:
        yield gateway


async def finished(http: httpx.AsyncClient, broker: Broker, store: ObjectStore, name: str, value: object) -> str:
    """The id of a job that ended with `value`, stored as a worker stores it."""
    job_id = (await http.post(f"/v1/functions/{name}/jobs", json=1)).json()["id"]
    claim: Claim = (await broker.claim(name, "worker-a", 1))[0]
    carried = payloads.put_result(store, job_id, claim.fence, pack({"value": value}))
    usage = pack({"tenant": claim.tenant, "attempt": 1, "queue_ms": 0})
    await broker.done(name, [Completion(job_id, claim.fence, carried, usage)])
    await until_state(broker, job_id, JobState.SUCCEEDED)
    return job_id


async def test_a_big_result_in_a_bucket_is_read_there(
    over_s3: RunningGateway, broker: Broker, bucket: ObjectStore, deploy: Deploy
) -> None:
    name = await deploy()
    async with httpx.AsyncClient(base_url=over_s3.url, timeout=20) as http:
        job_id = await finished(http, broker, bucket, name, to_ext(BIG))
        redirect = await http.get(f"/v1/jobs/{job_id}/result", headers=MSGPACK)
        assert redirect.status_code == 303
        async with httpx.AsyncClient() as anyone:
            answer = await anyone.get(redirect.headers["location"])
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/msgpack")
        np.testing.assert_array_equal(msgpack.unpackb(answer.content, ext_hook=opened), BIG)
        assert (await http.get(f"/v1/jobs/{job_id}/result")).json() == BIG.tolist()
        assert (await http.get(f"/v1/jobs/{job_id}")).json()["result"] == BIG.tolist()


async def test_elsewhere_it_comes_with_the_answer(
    http: httpx.AsyncClient, broker: Broker, store: ObjectStore, deploy: Deploy
) -> None:
    name = await deploy()
    for value in (to_ext(BIG), b"\x00small"):
        job_id = await finished(http, broker, store, name, value)
        answer = await http.get(f"/v1/jobs/{job_id}/result", headers=MSGPACK)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/msgpack")
        assert answer.content == msgpack.packb(value)


DEEP: list[object] = []
for _ in range(450):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (msgpack.ExtType(78, b"junk"), "[dtype, shape]"),
        (msgpack.ExtType(78, msgpack.packb(["<f8", [0, 1 << 31, 1 << 31, 1 << 31]])), "can't make an array"),
        (msgpack.ExtType(5, b"x"), "no array"),
        (msgpack.Timestamp(1), "no array"),
        ({msgpack.Timestamp(1): 1}, "$unreadable"),
        (DEEP, "nested deeper"),
    ],
)
async def test_every_route_shows_a_result_that_no_worker_should_have_sent(
    http: httpx.AsyncClient, broker: Broker, store: ObjectStore, deploy: Deploy, value: object, why: str
) -> None:
    name = await deploy()
    job_id = await finished(http, broker, store, name, value)
    for path in (f"/v1/jobs/{job_id}", f"/v1/jobs/{job_id}/result", f"/v1/jobs/{job_id}/events"):
        for accept in ("application/json", "application/msgpack, text/event-stream"):
            answer = await http.get(path, headers={"accept": accept})
            assert answer.status_code == 200, answer.text
            if accept == "application/json":
                assert "$unreadable" in answer.text and why in answer.text
    job = await broker.job(job_id)
    assert job is not None and job.finished_ms is not None
    delivery = Delivery(f"{job_id}/1", "https://a.example", "a", job.state, job.finished_ms, "pending", 0, b"")
    assert b"$unreadable" in event_body(delivery, job, None)


async def test_a_job_without_a_result_says_why(http: httpx.AsyncClient, broker: Broker, deploy: Deploy) -> None:
    name = await deploy()
    job_id = (await http.post(f"/v1/functions/{name}/jobs", json=1)).json()["id"]
    waiting = await http.get(f"/v1/jobs/{job_id}/result")
    assert (waiting.status_code, error_of(waiting)["code"]) == (409, "job_not_finished")
    boom = {"type": "function_error", "message": "boom", "code": "ValueError", "traceback": "..."}

    async def fail(task: Task) -> None:
        await task.fail(boom)

    async with worker(broker, name, fail):
        await until_state(broker, job_id, JobState.FAILED)
    failed = await http.get(f"/v1/jobs/{job_id}/result", headers=MSGPACK)
    assert (failed.status_code, error_of(failed)["message"]) == (500, "boom")
    assert (await http.get("/v1/jobs/nothing/result")).status_code == 404
