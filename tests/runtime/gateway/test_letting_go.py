"""A gateway that is told to stop: who waits for a job is answered, and the job goes on."""

import asyncio
from dataclasses import replace

import httpx

from stoker.queue.broker import Broker
from stoker.queue.records import JobState
from stoker.runtime.gateway.settings import GatewaySettings

from .conftest import RunningGateway
from .peers import Deploy, error_of, until_state


async def test_callers_are_answered_and_their_jobs_stay(
    settings: GatewaySettings, broker: Broker, deploy: Deploy
) -> None:
    name = await deploy()
    gateway = RunningGateway(replace(settings, gateway_id="gateway-stopping", drain_s=0.0))
    await asyncio.to_thread(gateway.start)
    path = f"/v1/functions/{name}"
    async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as client:
        queued = (await client.post(f"{path}/jobs", json=1)).json()["id"]
        asked = {
            "plain": client.post(path, json=1),
            "keyed": client.post(path, json=1, headers={"idempotency-key": "k"}),
            "patient": client.post(path, json=1, headers={"prefer": "wait=100"}),
            "looking": client.get(f"/v1/jobs/{queued}", headers={"prefer": "wait=100"}),
            "events": client.get(f"/v1/jobs/{queued}/events"),
        }
        waiting = {which: asyncio.create_task(request) for which, request in asked.items()}
        async with asyncio.timeout(30):
            while len(gateway.inside.followings) < len(asked):
                await asyncio.sleep(0.01)
        await asyncio.to_thread(gateway.stop)
        answers = {which: await task for which, task in waiting.items()}
    for which, final in (("plain", "false"), ("keyed", None)):
        assert (answers[which].status_code, error_of(answers[which])["code"]) == (503, "gateway_stopping")
        assert answers[which].headers.get("x-should-retry") == final
    assert answers["patient"].status_code == 202
    assert (answers["looking"].status_code, answers["looking"].json()["state"]) == (200, "queued")
    assert "event: state" in answers["events"].text and "event: error" not in answers["events"].text
    for which in ("plain", "keyed", "patient"):
        await until_state(broker, answers[which].headers["x-job-id"], JobState.QUEUED)
