import httpx
import pytest

from stoker.queue.broker import Broker
from stoker.queue.records import JobState, NewJob

from .conftest import Login
from .peers import Deploy, double, error_of, make_key, until_state, worker
from .test_job_routes import queue_job


async def listed(http: httpx.AsyncClient, **asked: object) -> list[dict]:
    found, after = [], None
    while True:
        params = {**asked, **({"after": after} if after else {})}
        page = (await http.get("/v1/jobs", params=params)).json()
        found += page["data"]
        after = page["next"]
        assert page["has_more"] == (after is not None)
        if after is None:
            return found


async def test_jobs_of_a_function_in_pages(http: httpx.AsyncClient, broker: Broker, deploy: Deploy) -> None:
    name = await deploy()
    done = [await queue_job(http, name) for _ in range(3)]
    async with worker(broker, name, double):
        for job_id in done:
            await until_state(broker, job_id, JobState.SUCCEEDED)
    waiting = [await queue_job(http, name) for _ in range(3)]
    (claim,) = await broker.claim(name, "w", 1)
    for limit in (1, 2, 100):
        rows = await listed(http, function=name, limit=limit)
        assert [row["state"] for row in rows] == ["running", "queued", "queued", *["succeeded"] * 3]
        assert [row["id"] for row in rows[:3]] == [claim.job_id, *waiting[1:]]
        assert {row["id"] for row in rows[3:]} == set(done)
    whole = (await http.get(f"/v1/jobs/{done[0]}")).json()
    (row,) = [row for row in rows if row["id"] == done[0]]
    assert row == {name: whole[name] for name in row if name != "tenant"} | {"tenant": "default"}
    assert [row["id"] for row in await listed(http, function=name, state="queued")] == waiting[1:]
    assert {row["id"] for row in await listed(http, limit=100)} >= {*done, *waiting}


@pytest.mark.parametrize(
    ("query", "param"), [("state=bored", "state"), ("limit=0", "limit"), ("limit=x", "limit"), ("after=zz", "after")]
)
async def test_what_makes_no_sense(http: httpx.AsyncClient, query: str, param: str) -> None:
    response = await http.get(f"/v1/jobs?{query}")
    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert (await http.get("/v1/jobs?function=nonesuch")).status_code == 404


async def test_each_tenant_sees_its_own_and_the_operator_all(
    root: httpx.AsyncClient, login: Login, broker: Broker, deploy: Deploy
) -> None:
    shared = await deploy()
    one = login((await make_key(root, "one", "invoke"))["key"])
    other = login((await make_key(root, "other", "invoke"))["key"])
    mine, theirs = await queue_job(one, shared), await queue_job(other, shared)
    assert [row["id"] for row in await listed(one, function=shared)] == [mine]
    assert [row["id"] for row in await listed(other)] == [theirs]
    assert {row["id"]: row["tenant"] for row in await listed(root, function=shared)} == {mine: "one", theirs: "other"}
    assert [row["id"] for row in await listed(root, function=shared, tenant="one")] == [mine]
    assert error_of(await one.get("/v1/jobs?tenant=other"))["param"] == "tenant"
    assert (await root.get(f"/v1/jobs/{mine}")).json()["id"] == mine
    assert (await other.get(f"/v1/jobs/{mine}")).status_code == 404


async def test_an_earlier_tenants_jobs_are_not_its_successors(
    root: httpx.AsyncClient, login: Login, broker: Broker, deploy: Deploy
) -> None:
    shared = await deploy()
    old = NewJob(id=f"{shared}-{'0' * 9}1{'1' * 16}", function=shared, tenant="heir", payload=b"")
    await broker.enqueue(old)
    heir = login((await make_key(root, "heir", "invoke"))["key"])
    new = await queue_job(heir, shared)
    assert [row["id"] for row in await listed(heir)] == [new]
