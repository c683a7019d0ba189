"""Webhooks as their receivers see them: a real receiver, the gateway's delivery, the specification's library."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from standardwebhooks.webhooks import WebhookVerificationError
from typer.testing import CliRunner

from stoker.queue.broker import Broker
from stoker.queue.records import JobState
from stoker.runtime.cli import app
from stoker.runtime.gateway.settings import GatewaySettings
from stoker.runtime.gateway.webhook_body import MOST_BYTES
from stoker.runtime.gateway.webhook_runner import MOST_OF_A_TENANT
from stoker.runtime.tenancy.api_key import Keyring
from stoker.runtime.webhooks.address import networks_of
from tests.runtime.webhooks.receiver import Receiver, receiving

from .conftest import SECRET, RunningGateway, running
from .peers import Deploy, double, error_of, make_key, until_state, worker
from .test_job_routes import queue_job

PAUSES_S = (0.05, 0.1)


@pytest.fixture(scope="module")
def hooked(settings: GatewaySettings) -> Iterator[RunningGateway]:
    """A gateway that may send to this machine, and tries again soon."""
    changes = {"secret": SECRET, "webhook_networks": networks_of("127.0.0.0/8"), "webhook_pauses_s": PAUSES_S}
    with running(replace(settings, gateway_id="gateway-hooked", **changes)) as gateway:
        yield gateway


@pytest.fixture
async def http(hooked: RunningGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=hooked.url, timeout=20) as client:
        yield client


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


async def submit(http: httpx.AsyncClient, name: str, url: str, value: object = 4) -> str:
    response = await http.post(f"/v1/functions/{name}/jobs", json=value, headers={"Webhook-URL": url})
    assert response.status_code == 202, response.text
    return response.json()["id"]


async def secret_of(http: httpx.AsyncClient) -> str:
    return (await http.get("/v1/webhooks/secret")).json()["secret"]


async def deliveries(http: httpx.AsyncClient, job_id: str, status: str = "") -> list[dict[str, Any]]:
    async with asyncio.timeout(10):
        while True:
            found = (await http.get(f"/v1/jobs/{job_id}/webhook-deliveries")).json()["data"]
            if not status or (found and found[-1]["status"] == status):
                return found
            await asyncio.sleep(0.02)


async def calls(receiver: Receiver, count: int) -> list[Any]:
    return await asyncio.to_thread(receiver.wait, count)


async def test_a_job_that_succeeds(http: httpx.AsyncClient, broker: Broker, deploy: Deploy, receiver: Receiver) -> None:
    name = await deploy()
    async with worker(broker, name, double):
        job_id = await submit(http, name, receiver.url)
        (call,) = await calls(receiver, 1)
    assert (call.method, call.path, call.headers["content-type"]) == ("POST", "/hook?a=1", "application/json")
    event = call.verified(await secret_of(http))
    assert (event["type"], event["data"]["id"], event["data"]["result"]) == ("job.succeeded", job_id, 8)
    assert event["data"] == {**(await http.get(f"/v1/jobs/{job_id}")).json(), "result_omitted": False}
    (delivery,) = await deliveries(http, job_id, "delivered")
    assert delivery["id"] == call.headers["webhook-id"] and delivery["type"] == "job.succeeded"
    (tried,) = delivery["tries"]
    assert (tried["status"], tried["error"]) == (200, None) and abs(tried["at"] - time.time()) < 5
    await asyncio.sleep(0.3)
    assert len(receiver.calls) == 1


@pytest.mark.parametrize("how", ["failed", "cancelled", "dead"])
async def test_other_ends(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy, receiver: Receiver, how: str
) -> None:
    name = await deploy()
    job_id = await submit(http, name, receiver.url)
    if how == "cancelled":
        await http.delete(f"/v1/jobs/{job_id}")
    else:
        fail = lambda task: task.fail({"type": "function_error", "message": "boom"}, retry=how == "dead")  # noqa: E731
        async with worker(broker, name, fail):
            await until_state(broker, job_id, JobState(how))
    (call,) = await calls(receiver, 1)
    event = call.verified(await secret_of(http))
    assert (event["type"], event["data"]["state"]) == (f"job.{how}", how)
    assert how == "cancelled" or event["data"]["error"]["message"] == "boom"


async def test_an_altered_or_old_call_is_not_believed(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy, receiver: Receiver
) -> None:
    name, secret = await deploy(), await secret_of(http)
    async with worker(broker, name, double):
        await submit(http, name, receiver.url)
        (call,) = await calls(receiver, 1)
    call.verified(secret)
    early = {**call.headers, "webhook-timestamp": str(int(call.headers["webhook-timestamp"]) - 301)}
    for forged in (
        replace(call, body=call.body.replace(b"succeeded", b"cancelled")),
        replace(call, headers={**call.headers, "webhook-id": "msg_other"}),
        replace(call, headers=early),
        replace(call, headers={**call.headers, "webhook-signature": "v1,AAAA"}),
    ):
        with pytest.raises(WebhookVerificationError):
            forged.verified(secret)


async def test_rotated_secrets_overlap(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy, receiver: Receiver
) -> None:
    name, old = await deploy(), await secret_of(http)
    rotated = (await http.post("/v1/webhooks/secret/rotate", json={"overlap_s": 60})).json()
    assert rotated["secret"] != old == rotated["previous"]
    async with worker(broker, name, double):
        await submit(http, name, receiver.url)
        (call,) = await calls(receiver, 1)
        assert call.verified(old) == call.verified(rotated["secret"])
        newest = (await http.post("/v1/webhooks/secret/rotate", json={"overlap_s": 0})).json()
        assert newest["previous"] is None
        await submit(http, name, receiver.url)
        call = (await calls(receiver, 2))[1]
    call.verified(newest["secret"])
    for gone in (old, rotated["secret"]):
        with pytest.raises(WebhookVerificationError):
            call.verified(gone)
    assert (await http.post("/v1/webhooks/secret/rotate", json={"overlap_s": -1})).status_code == 400


async def test_failures_are_tried_again_under_the_same_id(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy, receiver: Receiver
) -> None:
    answers = [(500, {}), (302, {"location": receiver.url.replace("hook", "elsewhere")}), (204, {})]
    receiver.answer = lambda number: answers[number]
    name = await deploy()
    async with worker(broker, name, double):
        job_id = await submit(http, name, receiver.url)
        seen = await calls(receiver, 3)
    assert len({call.headers["webhook-id"] for call in seen}) == 1
    assert len({call.body for call in seen}) == 1 and {call.path for call in seen} == {"/hook?a=1"}
    for call in seen:
        call.verified(await secret_of(http))
    (delivery,) = await deliveries(http, job_id, "delivered")
    assert [each["status"] for each in delivery["tries"]] == [500, 302, 204]


async def test_after_the_last_try_it_has_failed_until_it_is_replayed(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy, receiver: Receiver
) -> None:
    receiver.answer = lambda number: (503 if number < 3 else 200, {})
    name = await deploy()
    async with worker(broker, name, double):
        job_id = await submit(http, name, receiver.url)
        (delivery,) = await deliveries(http, job_id, "failed")
    assert [each["status"] for each in delivery["tries"]] == [503, 503, 503]
    replayed = await http.post(f"/v1/jobs/{job_id}/webhook-deliveries/replay")
    assert replayed.status_code == 202
    first, *_, last = await calls(receiver, 4)
    assert (last.headers["webhook-id"], last.body) == (first.headers["webhook-id"], first.body)
    (delivery,) = await deliveries(http, job_id, "delivered")
    assert len(delivery["tries"]) == 4


async def test_410_silences_a_url_until_a_replay(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy, receiver: Receiver
) -> None:
    receiver.answer = lambda number: (410 if number == 0 else 200, {})
    name = await deploy()
    async with worker(broker, name, double):
        first = await submit(http, name, receiver.url)
        await deliveries(http, first, "disabled")
        second = await submit(http, name, receiver.url)
        (delivery,) = await deliveries(http, second, "disabled")
        assert "answered 410" in delivery["tries"][0]["error"] and len(receiver.calls) == 1
        await http.post(f"/v1/jobs/{second}/webhook-deliveries/replay")
        await deliveries(http, second, "delivered")
        third = await submit(http, name, receiver.url)
        await deliveries(http, third, "delivered")
    assert len(receiver.calls) == 3


async def test_nobody_there(http: httpx.AsyncClient, broker: Broker, deploy: Deploy) -> None:
    with receiving() as gone:
        url = gone.url
    name = await deploy()
    async with worker(broker, name, double):
        job_id = await submit(http, name, url)
        (delivery,) = await deliveries(http, job_id, "failed")
    assert {each["status"] for each in delivery["tries"]} == {None}
    assert "ConnectError" in delivery["tries"][0]["error"] and len(delivery["tries"]) == 3


@pytest.mark.parametrize("size", [19_000, 30_000, 200_000])
async def test_a_large_result_is_left_out(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy, receiver: Receiver, size: int
) -> None:
    name = await deploy()
    async with worker(broker, name, lambda task: task.done({"value": "x" * size})):
        job_id = await submit(http, name, receiver.url)
        (call,) = await calls(receiver, 1)
    data = call.verified(await secret_of(http))["data"]
    assert len(call.body) < MOST_BYTES
    assert (data["result_omitted"], data["result"]) == ((True, None) if size > 19_500 else (False, "x" * size))
    assert (await http.get(data["links"]["self"])).json()["result"] == "x" * size
    assert data["id"] == job_id


async def test_a_huge_error_is_shortened(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy, receiver: Receiver
) -> None:
    error = {"type": "function_error", "message": "é" * 30_000, "traceback": "t" * 30_000}
    name = await deploy()
    async with worker(broker, name, lambda task: task.fail(error)):
        await submit(http, name, receiver.url)
        (call,) = await calls(receiver, 1)
    assert len(call.body) < MOST_BYTES
    assert call.event["data"]["error"]["message"] == "é" * 1000


async def test_an_end_is_told_although_the_record_is_gone(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy, receiver: Receiver, redis: Redis
) -> None:
    receiver.answer = lambda number: (500 if number == 0 else 200, {})
    name = await deploy()
    async with worker(broker, name, double):
        job_id = await submit(http, name, receiver.url)
        await calls(receiver, 1)
        await redis.delete(f"stoker:q:{{{name}}}:j:{job_id}")
        await calls(receiver, 2)
    assert receiver.calls[1].body == receiver.calls[0].body
    await deliveries(http, job_id, "delivered")
    await http.post(f"/v1/jobs/{job_id}/webhook-deliveries/replay")
    event = (await calls(receiver, 3))[2].verified(await secret_of(http))
    assert (event["type"], event["data"]["id"]) == ("job.succeeded", job_id)
    assert (event["data"]["result"], event["data"]["result_omitted"]) == (None, True)


async def test_synchronous_calls_have_webhooks_too(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy, receiver: Receiver
) -> None:
    name = await deploy()
    async with worker(broker, name, double):
        response = await http.post(f"/v1/functions/{name}", json=2, headers={"Webhook-URL": receiver.url})
        assert response.json() == 4
        (call,) = await calls(receiver, 1)
    assert call.event["data"]["id"] == response.headers["x-job-id"]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://example.com/", "looks like https://"),
        ("https://user:pw@example.com/", "no user or password"),
        ("https://10.0.0.1/", "not a public address"),
        ("https://[::ffff:169.254.169.254]/", "not a public address"),
        ("https://2130706433/", "usual form"),
        ("https://example.com:22/", "port"),
        ("https://example.com/" + "x" * 3000, "at most 2048"),
    ],
)
async def test_urls_that_are_refused_at_once(http: httpx.AsyncClient, deploy: Deploy, url: str, says: str) -> None:
    name = await deploy()
    response = await http.post(f"/v1/functions/{name}/jobs", json=1, headers={"Webhook-URL": url})
    assert response.status_code == 400
    assert says in error_of(response)["message"] and error_of(response)["code"] == "invalid_webhook_url"


async def test_without_the_deployments_secret_there_are_none(gateway: RunningGateway, deploy: Deploy) -> None:
    name = await deploy()
    async with httpx.AsyncClient(base_url=gateway.url) as plain:
        url = {"Webhook-URL": "https://example.com/"}
        assert error_of(await plain.post(f"/v1/functions/{name}/jobs", json=1, headers=url))["code"] == (
            "webhooks_unavailable"
        )
        assert (await plain.get("/v1/webhooks/secret")).status_code == 400


async def test_jobs_without_a_webhook_have_no_deliveries(http: httpx.AsyncClient, deploy: Deploy) -> None:
    name = await deploy()
    job_id = (await http.post(f"/v1/functions/{name}/jobs", json=1)).json()["id"]
    assert (await http.get(f"/v1/jobs/{job_id}/webhook-deliveries")).json()["data"] == []
    response = await http.post(f"/v1/jobs/{job_id}/webhook-deliveries/replay")
    assert (response.status_code, error_of(response)["code"]) == (404, "no_webhook")
    assert (await http.get("/v1/jobs/nonsense/webhook-deliveries")).status_code == 404


async def test_a_slow_receiver_of_one_tenant_holds_up_no_other(
    hooked: RunningGateway, broker: Broker, http: httpx.AsyncClient, deploy: Deploy, receiver: Receiver
) -> None:
    from stoker.queue.records import NewJob, new_job_id, pack

    name = await deploy()
    with receiving() as slow:
        release = asyncio.Event()
        loop = asyncio.get_running_loop()
        slow.answer = lambda _: (asyncio.run_coroutine_threadsafe(release.wait(), loop).result(10), (200, {}))[1]
        for tenant, url, count in (("slow", slow.url, 40), ("quick", receiver.url, 1)):
            for _ in range(count):
                job = NewJob(id=new_job_id(name), function=name, tenant=tenant, payload=pack({}), webhook=url)
                await broker.enqueue(job)
                await broker.cancel(job.id)
        await calls(receiver, 1)
        assert len(slow.calls) <= MOST_OF_A_TENANT < 40
        release.set()
        await calls(slow, 40)


async def test_tenants_have_secrets_and_deliveries_of_their_own(
    settings: GatewaySettings, broker: Broker, deploy: Deploy, receiver: Receiver
) -> None:
    changes = {"secret": SECRET, "keys_secret": SECRET, "webhook_networks": networks_of("127.0.0.0/8")}
    name = await deploy()
    with running(replace(settings, gateway_id="gateway-keyed-hooked", **changes)) as gateway:
        async with contextlib.AsyncExitStack() as stack:

            async def login(key: str) -> httpx.AsyncClient:
                headers = {"authorization": f"Bearer {key}"}
                return await stack.enter_async_context(httpx.AsyncClient(base_url=gateway.url, headers=headers))

            root = await login(Keyring(SECRET).root_text())
            ann = await login((await make_key(root, "ann", "invoke", "deploy"))["key"])
            bob = await login((await make_key(root, "bob", "invoke", "deploy"))["key"])
            caller = await login((await make_key(root, "bob", "invoke"))["key"])
            secrets = [await secret_of(client) for client in (ann, bob, root)]
            assert len(set(secrets)) == 3 and (await caller.get("/v1/webhooks/secret")).status_code == 403
            async with worker(broker, name, double):
                job_id = await submit(ann, name, receiver.url)
                (call,) = await calls(receiver, 1)
            call.verified(secrets[0])
            with pytest.raises(WebhookVerificationError):
                call.verified(secrets[1])
            path = f"/v1/jobs/{job_id}/webhook-deliveries"
            for client in (bob, root):
                assert (await client.get(path)).status_code == 404
                assert (await client.post(f"{path}/replay")).status_code == 404
            await deliveries(ann, job_id, "delivered")
            await root.delete("/v1/tenants/ann")
            heir = await login((await make_key(root, "ann", "invoke", "deploy"))["key"])
            assert await secret_of(heir) not in secrets
            assert (await heir.get(path)).status_code == 404
            for tenant in ("ann", "bob"):
                await root.delete(f"/v1/tenants/{tenant}")


async def test_from_the_command_line(
    hooked: RunningGateway, http: httpx.AsyncClient, broker: Broker, deploy: Deploy, receiver: Receiver
) -> None:
    async def stoker(*arguments: str) -> str:
        result = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--url", hooked.url])
        assert result.exit_code == 0, result.output
        return result.output

    receiver.answer = lambda number: (410 if number == 0 else 200, {})
    name = await deploy()
    async with worker(broker, name, double):
        job_id = await submit(http, name, receiver.url)
        await deliveries(http, job_id, "disabled")
    shown = await stoker("webhooks", "deliveries", job_id)
    assert all(text in shown for text in ("job.succeeded", "disabled", receiver.url, "410"))
    assert json.loads(await stoker("webhooks", "replay", job_id, "--json"))["data"][0]["job"] == job_id
    await deliveries(http, job_id, "delivered")
    old = (await stoker("webhooks", "secret")).strip()
    new = (await stoker("webhooks", "secret", "--rotate", "--overlap-s", "60")).strip()
    assert old.startswith("whsec_") and new.startswith("whsec_") and old != new
    listed = await stoker("jobs", "list", "--function", name)
    assert job_id in listed and "succeeded" in listed
    assert json.loads(await stoker("jobs", "list", "--function", name, "--json"))["data"][0]["id"] == job_id


async def test_a_function_may_declare_one(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy, receiver: Receiver
) -> None:
    name = await deploy(webhook=receiver.url)
    async with worker(broker, name, double):
        first = await queue_job(http, name)
        (call,) = await calls(receiver, 1)
        assert call.event["data"]["id"] == first
        assert (await http.get(f"/v1/jobs/{first}")).json()["webhook_url"] == receiver.url
        second = await submit(http, name, receiver.url.replace("hook", "other"))
        call = (await calls(receiver, 2))[1]
    assert (call.event["data"]["id"], call.path) == (second, "/other?a=1")


@pytest.mark.parametrize(("url", "says"), [("https://10.0.0.1/", "not a public address"), ("x", "looks like https")])
async def test_a_function_with_one_that_can_not_be_called_is_refused(
    http: httpx.AsyncClient, url: str, says: str
) -> None:
    spec = {"kind": "python", "code": "0" * 64, "entry": "m:f", "webhook": url}
    response = await http.put("/v1/functions/hooked", json={"spec": spec})
    assert response.status_code == 400 and says in error_of(response)["message"]
