import asyncio
import json

import httpx
import pytest
from redis.asyncio import Redis

from stoker.queue.broker import Broker
from stoker.queue.cluster import Cluster
from stoker.queue.keys import key
from stoker.queue.records import JobState, NewJob, new_job_id, pack
from stoker.runtime.spec import Limits

from .conftest import RunningGateway
from .peers import PATIENCE_S, Deploy, Task, double, error_of, server_events, until_state, worker


async def queue_job(http: httpx.AsyncClient, name: str, value: object = 1) -> str:
    return (await http.post(f"/v1/functions/{name}/jobs", json=value)).json()["id"]


async def test_a_job_from_waiting_to_done(http: httpx.AsyncClient, broker: Broker, deploy: Deploy) -> None:
    name = await deploy()
    job_id = await queue_job(http, name, 8)
    # The gateway looks at hosts once a second; an earlier test may have had one.
    for _ in range(30):
        waiting = (await http.get(f"/v1/jobs/{job_id}")).json()
        if waiting["wait_reason"] == "no host available":
            break
        await asyncio.sleep(0.1)
    assert (waiting["state"], waiting["attempt"], waiting["max_attempts"]) == ("queued", 0, 3)
    assert waiting["wait_reason"] == "no host available"
    assert waiting["queue_position"] == 0
    assert waiting["started_at"] is waiting["finished_at"] is waiting["error"] is waiting["result"] is None
    async with worker(broker, name, double):
        await until_state(broker, job_id, JobState.SUCCEEDED)
    response = await http.get(f"/v1/jobs/{job_id}")
    done = response.json()
    assert response.headers["x-job-id"] == job_id
    assert (done["state"], done["attempt"], done["result"], done["error"]) == ("succeeded", 1, 16, None)
    assert done["wait_reason"] is done["queue_position"] is None
    assert done["enqueued_at"] <= done["started_at"] <= done["finished_at"]
    assert done["timeline"] == [{"name": "run", "start_s": 0.0, "seconds": 2.0, "bytes": 7, "facts": {"limit": "cpu"}}]
    assert done["usage"]["tenant"] == "default"


async def test_a_waiting_job_says_why(
    http: httpx.AsyncClient, broker: Broker, cluster: Cluster, deploy: Deploy
) -> None:
    name = await deploy()
    replica = {
        "function": name,
        "version": "",
        "state": "loading",
        "loaded_bytes": 43,
        "total_bytes": 100,
        "inflight": 0,
        "error": None,
        "cold_start": None,
    }
    await cluster.report_host(
        "h1", {"id": "h1", "pid": 1, "started_ms": 1, "device": "cpu", "replicas": {"r": replica}}
    )
    first, second = await queue_job(http, name), await queue_job(http, name)
    reason = ""
    async with asyncio.timeout(PATIENCE_S):
        while reason != "loading weights 43 %":
            reason = (await http.get(f"/v1/jobs/{second}")).json()["wait_reason"]
    assert (await http.get(f"/v1/jobs/{second}")).json()["queue_position"] == 1
    assert (await http.get(f"/v1/functions/{name}")).json()["replicas"] == {"loading": 1}
    await cluster.forget_host("h1")
    assert first != second


async def test_a_failed_job_keeps_its_error_and_traceback(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    error = {"type": "function_error", "message": "boom", "code": "ValueError", "traceback": "File m.py"}
    name = await deploy()
    job_id = await queue_job(http, name)
    async with worker(broker, name, lambda task: task.fail(error)):
        await until_state(broker, job_id, JobState.FAILED)
    shown = (await http.get(f"/v1/jobs/{job_id}")).json()["error"]
    assert shown == {**error, "param": None, "status": 500}


@pytest.mark.parametrize("path", ["nothing", "a-b", "x-01ARZ3NDEKTSV4RRFFQ69G5FAV", "a%2Fb", "-"])
async def test_unknown_jobs_are_404(http: httpx.AsyncClient, path: str) -> None:
    for method, suffix in (("GET", ""), ("DELETE", ""), ("GET", "/events")):
        response = await http.request(method, f"/v1/jobs/{path}{suffix}")
        assert response.status_code == 404
        error_of(response)


async def test_a_job_that_is_no_longer_kept_is_410(
    http: httpx.AsyncClient, broker: Broker, redis: Redis, cluster: Cluster, deploy: Deploy
) -> None:
    name = await deploy(limits=Limits(retention_s=10))
    job_id = await queue_job(http, name)
    async with worker(broker, name, double):
        await until_state(broker, job_id, JobState.SUCCEEDED)
    left_ms = await redis.pttl(record := key(name, f"j:{job_id}"))
    assert 5_000 < left_ms <= 10_000
    await redis.pexpire(record, 1)
    await until_gone(broker, job_id)
    for method, suffix in (("GET", ""), ("DELETE", ""), ("GET", "/events"), ("POST", "/replay")):
        response = await http.request(method, f"/v1/jobs/{job_id}{suffix}")
        assert (response.status_code, error_of(response)["code"]) == (410, "result_expired")
    await cluster.delete_function(name)
    assert (await http.get(f"/v1/jobs/{job_id}")).status_code == 410


async def until_gone(broker: Broker, job_id: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await broker.job(job_id):
            await asyncio.sleep(0.01)


async def test_an_id_that_nobody_was_given_is_404(http: httpx.AsyncClient, deploy: Deploy) -> None:
    name = await deploy()
    for made_up in (new_job_id(name), f"{name}-{'0' * 10}{'1' * 16}"):
        assert (await http.get(f"/v1/jobs/{made_up}")).status_code == 404


async def test_an_operator_reads_another_tenants_job_and_leaves_it_alone(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    name = await deploy()
    job = NewJob(id=new_job_id(name), function=name, tenant="someone", payload=pack({}))
    await broker.enqueue(job)
    assert (await http.get(f"/v1/jobs/{job.id}")).json()["state"] == "queued"
    async with http.stream("GET", f"/v1/jobs/{job.id}/events") as events:
        assert events.status_code == 200
    for method, suffix in (("DELETE", ""), ("POST", "/replay")):
        assert (await http.request(method, f"/v1/jobs/{job.id}{suffix}")).status_code == 404
    seen = await broker.job(job.id)
    assert seen is not None and seen.state is JobState.QUEUED


async def test_cancelling_a_waiting_a_running_and_an_ended_job(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    still_mine: list[bool] = []
    claimed = asyncio.Event()

    async def stubborn(task: Task) -> None:
        claimed.set()
        while not still_mine or still_mine[-1]:
            still_mine.append(await task.emit({"value": 1}))
            await asyncio.sleep(0.01)

    name = await deploy()
    waiting = await queue_job(http, name)
    cancelled = (await http.delete(f"/v1/jobs/{waiting}")).json()
    assert (cancelled["state"], cancelled["error"]["code"]) == ("cancelled", "job_cancelled")
    running = await queue_job(http, name)
    async with worker(broker, name, stubborn):
        await claimed.wait()
        assert (await http.delete(f"/v1/jobs/{running}")).json()["state"] == "cancelled"
        async with asyncio.timeout(PATIENCE_S):
            while not still_mine or still_mine[-1]:
                await asyncio.sleep(0.01)
    again = await http.delete(f"/v1/jobs/{running}")
    assert (again.status_code, again.json()["state"]) == (200, "cancelled")


async def test_a_cancelled_call_answers_its_waiting_client(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    name = await deploy()
    call = asyncio.create_task(http.post(f"/v1/functions/{name}", json=1))
    async with asyncio.timeout(PATIENCE_S):
        while not (queued := (await broker.backlogs([name]))[name].queued):
            await asyncio.sleep(0.01)
    assert queued == 1
    job_id = await only_job(broker, name)
    await http.delete(f"/v1/jobs/{job_id}")
    response = await call
    assert (response.status_code, error_of(response)["code"]) == (499, "job_cancelled")
    assert response.headers["x-job-id"] == job_id


async def only_job(broker: Broker, name: str) -> str:
    (claim,) = await broker.claim(name, "test", 1)
    return claim.job_id


async def emit_five(task: Task) -> None:
    for number in range(5):
        await task.emit({"value": number})
    await task.done({"value": "all"})


async def test_events_of_an_ended_job_can_be_read_and_resumed(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    name = await deploy()
    job_id = await queue_job(http, name)
    async with worker(broker, name, emit_five):
        await until_state(broker, job_id, JobState.SUCCEEDED)
    url = f"/v1/jobs/{job_id}/events"
    whole = [event async for event in server_events(await http.get(url))]
    assert [event.name for event in whole] == ["state", "", "", "", "", "", "end"]
    assert json.loads(whole[0].data)["id"] == job_id
    assert [event.data for event in whole[1:-1]] == ["0", "1", "2", "3", "4"]
    assert json.loads(whole[-1].data) == {**json.loads(whole[-1].data), "state": "succeeded", "result": "all"}
    rest = [event async for event in server_events(await http.get(url, headers={"last-event-id": whole[3].id}))]
    assert rest[1:] == whole[4:]
    assert (await http.get(url, headers={"last-event-id": whole[-1].id})).status_code == 204
    assert (await http.get(url, headers={"last-event-id": "nonsense"})).status_code == 400


async def test_another_gateway_can_follow_a_running_job(
    http: httpx.AsyncClient, second_gateway: RunningGateway, broker: Broker, deploy: Deploy
) -> None:
    release = asyncio.Event()

    async def two_halves(task: Task) -> None:
        await task.emit({"value": "first"})
        await release.wait()
        await task.emit({"value": "second"})
        await task.done({"value": None})

    name = await deploy()
    job_id = await queue_job(http, name)
    seen = []
    async with (
        worker(broker, name, two_halves),
        httpx.AsyncClient(base_url=second_gateway.url, timeout=10) as other,
        other.stream("GET", f"/v1/jobs/{job_id}/events") as response,
    ):
        async for event in server_events(response):
            seen.append(event.data or event.name)
            if event.data == '"first"':
                release.set()
    values = [data for data in seen if data in ('"first"', '"second"')]
    assert values == ['"first"', '"second"']


async def test_a_failed_job_ends_its_events_with_an_error(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    name = await deploy()
    job_id = await queue_job(http, name)
    async with worker(broker, name, lambda task: task.fail({"type": "function_error", "message": "boom"})):
        await until_state(broker, job_id, JobState.FAILED)
    events = [event async for event in server_events(await http.get(f"/v1/jobs/{job_id}/events"))]
    assert [event.name for event in events] == ["state", "error"]
    assert json.loads(events[-1].data)["error"]["message"] == "boom"


async def test_a_job_whose_record_is_gone_ends_its_followers(
    http: httpx.AsyncClient, broker: Broker, redis: Redis, deploy: Deploy
) -> None:
    name = await deploy()
    job_id = await queue_job(http, name)
    async with http.stream("GET", f"/v1/jobs/{job_id}/events") as response:
        events = server_events(response)
        assert (await anext(events)).name == "state"
        keys = [key async for key in redis.scan_iter(match=f"*{{{name}}}*")]
        await redis.delete(*keys)
        rest = [event async for event in events if not event.comment]
    assert json.loads(rest[-1].data)["error"]["code"] == "result_expired"
