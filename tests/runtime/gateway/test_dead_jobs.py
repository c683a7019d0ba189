"""Dead letters over HTTP and on the command line."""

import asyncio
import json

import httpx
import pytest
from typer.testing import CliRunner

from stoker.queue.broker import Broker
from stoker.queue.records import JobState, NewJob, new_job_id, pack
from stoker.runtime.cli import app
from stoker.runtime.spec import Limits

from .conftest import RunningGateway
from .peers import Deploy, Task, double, error_of, until_state, worker

ERROR = {"type": "function_error", "message": "boom", "code": None, "traceback": None}


async def fail_always(task: Task) -> None:
    await task.fail(ERROR, retry=True)


async def dead_jobs(http: httpx.AsyncClient, broker: Broker, deploy: Deploy, count: int) -> tuple[str, list[str]]:
    """A function's name, and the ids of its dead letters, the newest first."""
    name = await deploy()
    ids = [new_job_id(name) for _ in range(count)]
    for job_id in ids:
        await broker.enqueue(
            NewJob(
                id=job_id, function=name, tenant="default", payload=pack({"kind": "call", "input": 4}), max_attempts=1
            )
        )
    async with worker(broker, name, fail_always):
        for job_id in ids:
            await until_state(broker, job_id, JobState.DEAD)
    return name, sorted(ids, reverse=True)


async def test_listed_in_pages(http: httpx.AsyncClient, broker: Broker, deploy: Deploy) -> None:
    name, ids = await dead_jobs(http, broker, deploy, 3)
    foreign = NewJob(id=new_job_id(name), function=name, tenant="other", payload=b"", max_attempts=1)
    await broker.enqueue(foreign)
    async with worker(broker, name, fail_always):
        await until_state(broker, foreign.id, JobState.DEAD)
    page = (await http.get(f"/v1/functions/{name}/dead")).json()
    assert ([job["id"] for job in page["data"]], page["has_more"]) == (ids, False)
    assert page["data"][0] == (await http.get(f"/v1/jobs/{ids[0]}")).json()
    assert page["data"][0]["error"]["message"] == "boom"
    first = (await http.get(f"/v1/functions/{name}/dead", params={"limit": 2})).json()
    assert ([job["id"] for job in first["data"]], first["has_more"]) == (ids[:2], True)
    rest = (await http.get(f"/v1/functions/{name}/dead", params={"limit": 2, "after": ids[1]})).json()
    assert ([job["id"] for job in rest["data"]], rest["has_more"]) == (ids[2:], False)


@pytest.mark.parametrize(
    "limit",
    ["0", "101", "x", "-1", "1e1", "٣", "9" * 5000, "000000001" + "9" * 5000, "0000000010000"],
    ids=lambda text: text[:20],
)
async def test_limits_that_are_none(http: httpx.AsyncClient, deploy: Deploy, limit: str) -> None:
    response = await http.get(f"/v1/functions/{await deploy()}/dead", params={"limit": limit})
    assert response.status_code == 400
    assert error_of(response)["param"] == "limit"


async def test_replayed_and_done(http: httpx.AsyncClient, broker: Broker, deploy: Deploy) -> None:
    name, (job_id,) = await dead_jobs(http, broker, deploy, 1)
    response = await http.post(f"/v1/jobs/{job_id}/replay")
    assert response.status_code == 200
    assert (response.json()["state"], response.json()["attempt"]) == ("queued", 0)
    assert (response.json()["error"], response.json()["usage"], response.json()["timeline"]) == (None, None, [])
    assert response.headers["x-job-id"] == job_id
    again = await http.post(f"/v1/jobs/{job_id}/replay")
    assert (again.status_code, error_of(again)["code"]) == (409, "job_not_replayable")
    async with worker(broker, name, double):
        await until_state(broker, job_id, JobState.SUCCEEDED)
    assert (await http.get(f"/v1/jobs/{job_id}")).json()["result"] == 8
    assert (await http.post(f"/v1/jobs/{job_id}/replay")).status_code == 409
    assert (await http.get(f"/v1/functions/{name}/dead")).json()["data"] == []


async def test_what_ended_otherwise_is_told_to_be_sent_again(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    async def hang(task: Task) -> None:
        await until_state(broker, task.claim.job_id, JobState.TIMED_OUT)

    name = await deploy(limits=Limits(run_within_s=0.05))
    timed_out = (await http.post(f"/v1/functions/{name}/jobs", json=1)).json()["id"]
    async with worker(broker, name, hang):
        await until_state(broker, timed_out, JobState.TIMED_OUT)
    cancelled = (await http.post(f"/v1/functions/{name}/jobs", json=1)).json()["id"]
    await broker.cancel(cancelled)
    new = "Its input is no longer kept: send that again as a new job"
    for job_id, state, advice in (
        (timed_out, "timed_out", f"{new}, once the function's time limit is as long as it needs."),
        (cancelled, "cancelled", f"{new}."),
    ):
        refused = await http.post(f"/v1/jobs/{job_id}/replay")
        message = f"Job '{job_id}' is {state}; only a dead or a failed job can be replayed. {advice}"
        assert (refused.status_code, error_of(refused)["message"]) == (409, message)


async def test_cancel_of_what_had_ended_says_so_and_is_no_failure(
    http: httpx.AsyncClient, gateway: RunningGateway, broker: Broker, deploy: Deploy
) -> None:
    async def cancel(job_id: str) -> str:
        command = ["jobs", "cancel", job_id, "--url", gateway.url]
        result = await asyncio.to_thread(CliRunner().invoke, app, command)
        assert result.exit_code == 0, result.output
        return result.output

    name, (dead,) = await dead_jobs(http, broker, deploy, 1)
    assert await cancel(dead) == f"{dead}: had ended already: dead\n"
    waiting = (await http.post(f"/v1/functions/{name}/jobs", json=1)).json()["id"]
    assert await cancel(waiting) == f"{waiting}: cancelled\n"
    assert await cancel(waiting) == f"{waiting}: had ended already: cancelled\n"


async def test_one_key_replays_once(http: httpx.AsyncClient, broker: Broker, deploy: Deploy) -> None:
    name, (job_id,) = await dead_jobs(http, broker, deploy, 1)
    for state in ("queued", "queued"):
        response = await http.post(f"/v1/jobs/{job_id}/replay", headers={"idempotency-key": "k"})
        assert (response.status_code, response.json()["state"]) == (200, state)
    async with worker(broker, name, fail_always):
        await until_state(broker, job_id, JobState.DEAD)
    response = await http.post(f"/v1/jobs/{job_id}/replay", headers={"idempotency-key": "k"})
    assert (response.status_code, response.json()["state"]) == (200, "dead")


async def test_what_is_unknown(http: httpx.AsyncClient, broker: Broker, deploy: Deploy) -> None:
    name = await deploy()
    foreign = NewJob(id=new_job_id(name), function=name, tenant="other", payload=b"")
    await broker.enqueue(foreign)
    for path in (f"/v1/jobs/{new_job_id(name)}/replay", f"/v1/jobs/{foreign.id}/replay", "/v1/jobs/nothing/replay"):
        response = await http.post(path)
        assert (response.status_code, error_of(response)["code"]) == (404, "job_not_found")
    response = await http.get("/v1/functions/nothing/dead")
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")
    await broker.cancel(foreign.id)


async def test_a_deleted_functions_job_is_not_replayed(http: httpx.AsyncClient, broker: Broker, deploy: Deploy) -> None:
    name, (job_id,) = await dead_jobs(http, broker, deploy, 1)
    await http.delete(f"/v1/functions/{name}")
    response = await http.post(f"/v1/jobs/{job_id}/replay")
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")
    job = await broker.job(job_id)
    assert job is not None and job.state is JobState.DEAD


async def test_on_the_command_line(
    http: httpx.AsyncClient, gateway: RunningGateway, broker: Broker, deploy: Deploy
) -> None:
    name, ids = await dead_jobs(http, broker, deploy, 2)

    async def stoker(*arguments: str) -> str:
        command = [*arguments, "--url", gateway.url]
        result = await asyncio.to_thread(CliRunner().invoke, app, command, env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        return result.output

    page = json.loads(await stoker("jobs", "dead", name, "--json"))
    assert [job["id"] for job in page["data"]] == ids
    table = await stoker("jobs", "dead", name, "--limit", "1")
    assert "boom" in table and f"more with --after {ids[0]}" in table
    assert await stoker("jobs", "replay", ids[0]) == f"{ids[0]}: queued\n"
    assert [job["id"] for job in json.loads(await stoker("jobs", "dead", name, "--json"))["data"]] == ids[1:]
