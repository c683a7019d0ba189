import asyncio
import json
from typing import Any

import httpx
import pytest

from stoker.queue.broker import Broker
from stoker.queue.records import JobState, Limits, unpack
from stoker.runtime.spec import Limits as SpecLimits
from tests.connections import connected

from .conftest import RunningGateway
from .peers import Deploy, Task, double, error_of, server_events, until_state, worker

BOOM = {"type": "function_error", "message": "boom", "code": "ValueError", "traceback": "Traceback ..."}


async def count_to_three(task: Task) -> None:
    for number in (1, 2, 3):
        await task.emit({"value": {"n": number}})
    await task.done({"value": None})


async def test_a_call_returns_the_value(http: httpx.AsyncClient, broker: Broker, deploy: Deploy) -> None:
    name = await deploy()
    async with worker(broker, name, double):
        response = await http.post(f"/v1/functions/{name}", json=21)
    assert (response.status_code, response.json()) == (200, 42)
    assert response.headers["x-job-id"].startswith(name)


@pytest.mark.parametrize("value", [None, 0, -(1 << 63), 1.5, "é\u0000\U0001f600", [], {"a": {"b": [1, None, True]}}])
async def test_any_json_goes_in_and_comes_out(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy, value: Any
) -> None:
    async def echo(task: Task) -> None:
        await task.done({"value": task.payload["input"]})

    name = await deploy()
    async with worker(broker, name, echo):
        response = await http.post(f"/v1/functions/{name}", content=json.dumps(value))
    assert response.json() == value


async def test_no_body_is_null(http: httpx.AsyncClient, broker: Broker, deploy: Deploy) -> None:
    async def is_null(task: Task) -> None:
        await task.done({"value": task.payload["input"] is None})

    name = await deploy()
    async with worker(broker, name, is_null):
        assert (await http.post(f"/v1/functions/{name}")).json() is True


async def test_a_result_too_big_for_an_event_is_read_from_the_record(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    async def big(task: Task) -> None:
        await task.done({"value": "x" * 300_000})

    name = await deploy()
    async with worker(broker, name, big):
        assert len((await http.post(f"/v1/functions/{name}")).json()) == 300_000


async def test_numbers_that_json_cannot_hold_become_null(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    async def not_a_number(task: Task) -> None:
        await task.done({"value": [float("nan"), b"\x00"]})

    name = await deploy()
    async with worker(broker, name, not_a_number):
        assert (await http.post(f"/v1/functions/{name}")).json() == [None, {"$bytes": "AA=="}]


async def test_a_failing_function_is_a_500_that_clients_do_not_repeat(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    name = await deploy()
    async with worker(broker, name, lambda task: task.fail(BOOM)):
        response = await http.post(f"/v1/functions/{name}", json=1)
    assert response.status_code == 500
    assert error_of(response) == {"message": "boom", "type": "function_error", "param": None, "code": "ValueError"}
    assert response.headers["x-should-retry"] == "false"
    assert response.headers["x-job-id"]


async def test_an_unknown_function_is_404(http: httpx.AsyncClient) -> None:
    for method, path in (("POST", ""), ("GET", ""), ("DELETE", ""), ("POST", "/jobs"), ("PUT", "/jobs/1")):
        response = await http.request(method, f"/v1/functions/nothing_here{path}")
        assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("body", ["{", "", "[1,]", '{"a": NaN}', "\xff", "[" * 500])
async def test_malformed_json_is_400(http: httpx.AsyncClient, deploy: Deploy, body: str) -> None:
    name = await deploy()
    response = await http.post(f"/v1/functions/{name}", content=body.encode("latin-1") or b" ")
    assert response.status_code == 400
    assert error_of(response)["code"] == "invalid_json"


async def test_an_integer_over_64_bits_is_400(http: httpx.AsyncClient, deploy: Deploy) -> None:
    name = await deploy()
    assert (await http.post(f"/v1/functions/{name}", content=str(1 << 64))).status_code == 400


async def test_respond_async_is_202_at_once(http: httpx.AsyncClient, broker: Broker, deploy: Deploy) -> None:
    name = await deploy()
    response = await http.post(f"/v1/functions/{name}", json=2, headers={"prefer": "respond-async"})
    assert response.status_code == 202
    body = response.json()
    assert response.headers["location"] == body["links"]["self"] == f"/v1/jobs/{body['id']}"
    assert response.headers["x-job-id"] == body["id"]
    assert (body["object"], body["state"], body["function"]) == ("job", "queued", name)
    assert response.headers["preference-applied"] == "respond-async"
    async with worker(broker, name, double):
        await until_state(broker, body["id"], JobState.SUCCEEDED)
    assert (await http.get(body["links"]["self"])).json()["result"] == 4


async def test_wait_hands_over_to_a_job_that_goes_on(http: httpx.AsyncClient, broker: Broker, deploy: Deploy) -> None:
    release = asyncio.Event()

    async def slow(task: Task) -> None:
        await release.wait()
        await double(task)

    name = await deploy()
    async with worker(broker, name, slow):
        response = await http.post(f"/v1/functions/{name}", json=5, headers={"prefer": "wait=1"})
        assert (response.status_code, response.json()["state"]) == (202, "running")
        assert "wait_reason" not in response.json()
        release.set()
        job = await until_state(broker, response.headers["x-job-id"], JobState.SUCCEEDED)
        quick = await http.post(f"/v1/functions/{name}", json=6, headers={"prefer": "respond-async, wait=5"})
    assert job.result is not None and unpack(job.result) == {"value": 10}
    assert (quick.status_code, quick.json()) == (200, 12)


async def test_wait_hands_over_to_a_job_that_still_waits(http: httpx.AsyncClient, deploy: Deploy) -> None:
    name = await deploy()
    response = await http.post(f"/v1/functions/{name}", json=5, headers={"prefer": "wait=1"})
    body = response.json()
    assert (response.status_code, body["state"], body["wait_reason"]) == (202, "queued", "no host available")
    assert (await http.get(response.headers["location"])).json()["state"] == "queued"


async def test_generators_stream_as_events(http: httpx.AsyncClient, broker: Broker, deploy: Deploy) -> None:
    name = await deploy()
    async with (
        worker(broker, name, count_to_three),
        http.stream("POST", f"/v1/functions/{name}", headers={"accept": "text/event-stream"}) as response,
    ):
        events = [event async for event in server_events(response)]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert (response.headers["cache-control"], response.headers["x-accel-buffering"]) == ("no-cache", "no")
    values, end = events[:-1], events[-1]
    assert [json.loads(event.data) for event in values] == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert all(event.id and not event.name for event in values)
    assert (end.name, json.loads(end.data)["state"]) == ("end", "succeeded")


async def test_a_stream_to_a_client_of_http_1_0_is_plain_and_ends_with_the_connection(
    gateway: RunningGateway, broker: Broker, deploy: Deploy
) -> None:
    name = await deploy()
    url = httpx.URL(gateway.url)
    async with worker(broker, name, count_to_three), connected(url.host, url.port or 80) as (reader, writer):
        head = f"POST /v1/functions/{name} HTTP/1.0\r\naccept: text/event-stream\r\ncontent-length: 0\r\n\r\n"
        writer.write(head.encode())
        answer = await asyncio.wait_for(reader.read(), 20)
    head, _, body = answer.decode().partition("\r\n\r\n")
    assert "transfer-encoding" not in head and "connection: close" in head
    events = [frame.split("\n") for frame in body.removesuffix("\n\n").split("\n\n") if not frame.startswith(":")]
    assert [lines[-1] for lines in events[:-1]] == [f'data: {{"n":{n}}}' for n in (1, 2, 3)], body
    assert events[-1][0] == "event: end"


async def test_a_stream_that_fails_before_its_first_event_has_a_status(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    name = await deploy()
    async with worker(broker, name, lambda task: task.fail(BOOM)):
        response = await http.post(f"/v1/functions/{name}", headers={"accept": "text/event-stream"})
    assert response.status_code == 500
    assert error_of(response)["message"] == "boom"


async def test_a_stream_that_fails_later_ends_with_an_error_event(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    async def half(task: Task) -> None:
        await task.emit({"value": 1})
        await task.fail(BOOM)

    name = await deploy()
    async with worker(broker, name, half):
        response = await http.post(f"/v1/functions/{name}", headers={"accept": "text/event-stream"})
        events = [event async for event in server_events(response)]
    assert [event.name for event in events] == ["", "error"]
    assert json.loads(events[-1].data)["error"]["message"] == "boom"


async def test_a_second_attempt_is_marked_in_the_stream(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    async def flaky(task: Task) -> None:
        await task.emit({"value": task.claim.attempt})
        await (task.fail(BOOM, retry=True) if task.claim.attempt == 1 else task.done({"value": None}))

    name = await deploy()
    async with worker(broker, name, flaky):
        response = await http.post(f"/v1/functions/{name}", headers={"accept": "text/event-stream"})
        events = [event async for event in server_events(response) if not event.comment]
    assert [(event.name, event.data) for event in events[:-1]] == [("", "1"), ("retry", '{"attempt":2}'), ("", "2")]
    assert events[-1].name == "end"


async def test_an_idempotency_key_runs_once(http: httpx.AsyncClient, broker: Broker, deploy: Deploy) -> None:
    runs: list[str] = []

    async def counted(task: Task) -> None:
        runs.append(task.claim.job_id)
        await task.done({"value": task.payload["input"]})

    name = await deploy()
    key = {"idempotency-key": "order-1"}
    async with worker(broker, name, counted):
        first = await http.post(f"/v1/functions/{name}", content='{"a":1,"b":[2]}', headers=key)
        again = await http.post(f"/v1/functions/{name}", content=' {"b": [2], "a": 1}', headers=key)
        other = await http.post(f"/v1/functions/{name}", json={"a": 2}, headers=key)
    assert (first.status_code, first.json()) == (200, {"a": 1, "b": [2]})
    assert "idempotency-replayed" not in first.headers
    assert (again.status_code, again.content) == (first.status_code, first.content)
    assert again.headers["idempotency-replayed"] == "true"
    assert again.headers["x-job-id"] == first.headers["x-job-id"]
    assert (other.status_code, error_of(other)["code"]) == (409, "idempotency_key_reused")
    assert len(runs) == 1


async def test_concurrent_requests_with_one_key_share_one_job(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    name = await deploy()
    requests = [http.post(f"/v1/functions/{name}", json=4, headers={"idempotency-key": "k"}) for _ in range(5)]
    async with worker(broker, name, double):
        responses = await asyncio.gather(*requests)
    assert {response.json() for response in responses} == {8}
    assert len({response.headers["x-job-id"] for response in responses}) == 1


OVERTAKEN = {"type": "invalid_request_error", "message": "another version", "code": "version_changed"}


async def test_a_key_whose_job_a_deployment_overtook_runs_anew(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    seen: list[str] = []

    async def overtaken_once(task: Task) -> None:
        seen.append(task.claim.job_id)
        await (task.fail(OVERTAKEN) if len(seen) in (1, 3) else double(task))

    name, key = await deploy(), {"idempotency-key": "order-1"}
    own = f"/v1/functions/{name}/jobs/order-1"
    async with worker(broker, name, overtaken_once):
        told = await http.post(f"/v1/functions/{name}", json=4, headers=key)
        assert (told.status_code, error_of(told)["code"], told.headers["retry-after"]) == (503, "version_changed", "1")
        again, once_more = [await http.post(f"/v1/functions/{name}", json=4, headers=key) for _ in range(2)]
        first = await http.put(own, json=5, headers={"prefer": "wait=20"})
        assert (await http.get(own)).json()["id"] == first.json()["id"]
        second = await http.put(own, json=5, headers={"prefer": "wait=20"})
    assert (again.json(), once_more.json()) == (8, 8) and "idempotency-replayed" not in again.headers
    assert again.headers["x-job-id"] == once_more.headers["x-job-id"] == seen[1] != seen[0]
    assert [first.json()["state"], second.json()["state"], second.json()["result"]] == ["failed", "succeeded", 10]
    assert (await http.get(own)).json()["id"] == second.json()["id"] and len(seen) == 4


async def test_a_key_whose_job_failed_by_itself_keeps_its_answer(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    name, key = await deploy(), {"idempotency-key": "order-1"}
    async with worker(broker, name, lambda task: task.fail({**OVERTAKEN, "code": "bad_order"})):
        answers = [await http.post(f"/v1/functions/{name}", json=4, headers=key) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert answers[0].headers["x-job-id"] == answers[1].headers["x-job-id"]


async def test_bad_idempotency_keys_are_400(http: httpx.AsyncClient, deploy: Deploy) -> None:
    name = await deploy()
    response = await http.post(f"/v1/functions/{name}", json=1, headers={"idempotency-key": "k" * 256})
    assert (response.status_code, error_of(response)["param"]) == (400, "Idempotency-Key")


async def test_jobs_may_be_put_under_the_clients_own_id(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    name = await deploy()
    url = f"/v1/functions/{name}/jobs/order-0001"
    first, again = await http.put(url, json=3), await http.put(url, json=3)
    other, bad = await http.put(url, json=4), await http.put(f"{url}%20x", json=4)
    posted = await http.post(f"/v1/functions/{name}/jobs", json=3)
    assert [response.status_code for response in (first, again, other, bad, posted)] == [202, 202, 409, 400, 202]
    assert error_of(other)["message"] == "The job id 'order-0001' was used before with a different request body."
    assert again.json() == first.json() and again.headers["idempotency-replayed"] == "true"
    assert posted.json()["id"] != first.json()["id"]
    async with worker(broker, name, double):
        await until_state(broker, first.json()["id"], JobState.SUCCEEDED)
        done = await http.put(url, json=3)
    assert done.json()["state"] == "succeeded"


async def test_a_job_is_found_under_the_id_that_it_was_put_under(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    """Within its function; its links lead on."""
    name, other = await deploy(), await deploy()
    path = "jobs/order-0001"
    missing = await http.get(f"/v1/functions/{name}/{path}")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "job_not_found")
    put = await http.put(f"/v1/functions/{name}/{path}", json=3)
    found = await http.get(f"/v1/functions/{name}/{path}")
    assert (found.status_code, found.json()["id"], found.json()["state"]) == (200, put.json()["id"], "queued")
    assert (await http.get(found.json()["links"]["self"])).json()["id"] == put.json()["id"]
    assert (await http.get(f"/v1/functions/{other}/{path}")).status_code == 404
    assert (await http.get("/v1/jobs/order-0001")).status_code == 404
    assert await broker.job_id_of(name, "somebody else", "id:order-0001") is None
    cancelled = await http.delete(f"/v1/functions/{name}/{path}")
    assert (cancelled.status_code, cancelled.json()["state"]) == (200, "cancelled")


async def test_a_full_queue_is_429_with_retry_after(http: httpx.AsyncClient, broker: Broker, deploy: Deploy) -> None:
    name = await deploy()
    await broker.set_limits(name, Limits(max_queued=1))
    assert (await http.post(f"/v1/functions/{name}/jobs", json=1)).status_code == 202
    for path in (f"/v1/functions/{name}/jobs", f"/v1/functions/{name}"):
        response = await http.post(path, json=1)
        assert response.status_code == 429
        assert error_of(response)["code"] == "rate_limit_exceeded"
        assert int(response.headers["retry-after"]) >= 1


async def test_a_job_that_cannot_start_in_time_is_504(http: httpx.AsyncClient, broker: Broker, deploy: Deploy) -> None:
    name = await deploy(limits=SpecLimits(start_within_s=0.05))

    async def sweep() -> None:
        while True:
            await broker.tick(name)
            await asyncio.sleep(0.02)

    sweeping = asyncio.create_task(sweep())
    response = await http.post(f"/v1/functions/{name}", json=1)
    sweeping.cancel()
    assert response.status_code == 504
    assert error_of(response)["code"] == "expired_before_start"
