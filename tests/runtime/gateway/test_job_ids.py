import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from stoker.queue.records import CROCKFORD, function_of, made_at_ms, new_job_id
from stoker.runtime.gateway.job_ids import MARK_DIGITS, JobIds

from .conftest import Login
from .peers import Deploy, error_of, make_key
from .test_job_routes import queue_job

TENANTS = st.sampled_from(["default", "acme", "acme-2", "a"])


@given(st.sampled_from(["f", "text-to-image", "acme.f"]), TENANTS, TENANTS)
def test_only_the_own_deployment_and_tenant_fit(function: str, tenant: str, other: str) -> None:
    ids = JobIds("the secret of this deployment")
    made = ids.new(function, tenant)
    assert function_of(made) == function and abs(made_at_ms(made) - made_at_ms(new_job_id(function))) < 5000
    assert ids.made_here(made, tenant)
    assert ids.made_here(made, other) == (tenant == other)
    assert not JobIds("another deployment's secret").made_here(made, tenant)


def test_no_made_up_id_fits() -> None:
    ids = JobIds("the secret of this deployment")
    made = ids.new("f", "a")
    for place in range(2, 26):
        at = len(made) - 26 + place
        digit = CROCKFORD[(CROCKFORD.index(made[at]) + 1) % 32]
        assert not ids.made_here(made[:at] + digit + made[at + 1 :], "a")
    assert sum(ids.made_here(new_job_id("f"), "a") for _ in range(2000)) == 0
    with pytest.raises(ValueError):
        ids.made_here("f", "a")


def test_ids_differ_and_rise_with_time() -> None:
    ids = JobIds("secret")
    made = [ids.new("f", "a") for _ in range(5000)]
    assert len({each[:-MARK_DIGITS] for each in made}) == len(made)
    assert [made_at_ms(each) for each in made] == sorted(made_at_ms(each) for each in made)


async def test_a_job_that_is_gone_is_410_for_its_tenant_alone(
    root: httpx.AsyncClient, login: Login, redis: Redis, deploy: Deploy
) -> None:
    shared = await deploy()
    one = login((await make_key(root, "one", "invoke"))["key"])
    other = login((await make_key(root, "other", "invoke"))["key"])
    job_id = await queue_job(one, shared)
    await redis.delete(*[key async for key in redis.scan_iter(match=f"*{{{shared}}}*")])
    assert error_of(await one.get(f"/v1/jobs/{job_id}"))["code"] == "result_expired"
    for client in (other, root):
        assert error_of(await client.get(f"/v1/jobs/{job_id}"))["code"] == "job_not_found"
    await root.delete("/v1/tenants/one")
    heir = login((await make_key(root, "one", "invoke"))["key"])
    assert error_of(await heir.get(f"/v1/jobs/{job_id}"))["code"] == "job_not_found"
