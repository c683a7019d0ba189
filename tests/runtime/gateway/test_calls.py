"""What becomes of a deployed function's limits in its jobs."""

from typing import Any

import httpx
import pytest

from stoker.queue.broker import Broker
from stoker.queue.records import JobState
from stoker.runtime.gateway.calls import milliseconds
from stoker.runtime.spec import Limits

from .peers import Deploy, until_state


@pytest.mark.parametrize(
    ("seconds", "as_milliseconds"), [(0, 0), (1e-300, 1), (0.0004, 1), (0.07, 70), (1.0006, 1001), (1e9, 10**12)]
)
def test_a_limit_above_none_never_becomes_none(seconds: float, as_milliseconds: int) -> None:
    assert milliseconds(seconds) == as_milliseconds


@pytest.mark.parametrize("limit", ["start_within_s", "finish_within_s"])
async def test_a_limit_of_less_than_a_millisecond_ends_the_wait(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy, limit: str
) -> None:
    limits: dict[str, Any] = {limit: 0.0004}
    name = await deploy(limits=Limits(**limits))
    answer = await http.post(f"/v1/functions/{name}/jobs", json=1)
    await broker.tick_all([name])
    await until_state(broker, answer.json()["id"], JobState.EXPIRED)


async def test_a_limit_of_less_than_a_millisecond_ends_the_run(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    name = await deploy(limits=Limits(run_within_s=0.0004))
    answer = await http.post(f"/v1/functions/{name}/jobs", json=1)
    assert await broker.claim(name, "w", 1)
    await broker.tick_all([name])
    await until_state(broker, answer.json()["id"], JobState.TIMED_OUT)
