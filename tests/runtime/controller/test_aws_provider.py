"""The provider against moto and a real queue server, host agents' reports being the test's own."""

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from stoker.queue.cluster import LEADER_FENCE, Cluster
from stoker.runtime.controller.aws_provider import AwsProvider
from stoker.runtime.controller.fleet_plan import Orders
from stoker.runtime.controller.leader import Leadership
from tests.e2e.aws_api import KEYS, Faults, Moto, Proxy

pytestmark = pytest.mark.xdist_group("aws")

NUMBERS = itertools.count()
BODY: dict[str, Any] = {"devices": ["cpu"], "replicas": {}, "notice": None}


@pytest.fixture(scope="module")
def moto() -> Iterator[Moto]:
    moto = Moto()
    moto.start()
    yield moto
    moto.stop()


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def proxy(moto: Moto, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    proxy = Proxy(moto, faults, lambda: None)
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": proxy.url}.items():
        monkeypatch.setenv(name, value)
    proxy.start()
    yield proxy
    proxy.stop()


@pytest.fixture
def pool(moto: Moto) -> str:
    name = f"pool{next(NUMBERS)}"
    moto.make_group(name, price=0.1, cluster=name)
    return name


@pytest.fixture
def leadership(cluster: Cluster) -> Leadership:
    return Leadership(cluster, "me")


@pytest.fixture
async def provider(cluster: Cluster, leadership: Leadership, pool: str, proxy: Proxy) -> AsyncIterator[AwsProvider]:
    await leadership.acquire()
    provider = AwsProvider(cluster, leadership, pool)
    running = asyncio.create_task(provider.run())
    yield provider
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def drive(
    provider: AwsProvider,
    leadership: Leadership,
    cluster: Cluster,
    until: Callable[[], Any],
    *,
    hosts: dict[str, int],
    retire: frozenset[str] = frozenset(),
    body: str = "",
) -> None:
    """What a controller's sweeps do, until something holds; `body` is a host whose agent reports meanwhile."""
    async with asyncio.timeout(30):
        while not until():
            await leadership.acquire()
            if body:
                await cluster.report_host(body, BODY)
            fleet = provider.fleet(await cluster.hosts())
            provider.order(Orders(hosts, retire, look=fleet.look))
            await asyncio.sleep(0.05)


def changes(proxy: Proxy) -> list[str]:
    return [action for action, _ in proxy.calls if not action.startswith("Describe")]


async def test_a_leader_that_has_lost_its_term_changes_nothing(
    provider: AwsProvider, leadership: Leadership, cluster: Cluster, proxy: Proxy, pool: str
) -> None:
    await drive(provider, leadership, cluster, lambda: provider.fleet({}).pools, hosts={})
    await cluster._redis.incr(LEADER_FENCE)
    provider.order(Orders({pool: 1}, look=provider.fleet({}).look))
    until = time.monotonic() + 20
    while provider.fleet({}).pools:
        assert time.monotonic() < until
        await asyncio.sleep(0.02)
    assert changes(proxy) == []


async def test_an_api_that_is_away_is_said_and_waited_for(
    provider: AwsProvider, leadership: Leadership, cluster: Cluster, moto: Moto, proxy: Proxy, pool: str
) -> None:
    url, moto.url = moto.url, "http://127.0.0.1:9"
    await drive(provider, leadership, cluster, lambda: "503" in provider.fleet({}).trouble, hosts={pool: 1})
    moto.url = url
    await drive(provider, leadership, cluster, lambda: moto.instances(pool), hosts={pool: 1})
    assert provider.fleet({}).trouble == ""


async def test_an_answer_that_breaks_off_is_said_and_asked_for_again(
    provider: AwsProvider, leadership: Leadership, cluster: Cluster, faults: Faults, moto: Moto, pool: str
) -> None:
    faults.cut = {"DescribeAutoScalingGroups"}
    said = "DescribeAutoScalingGroups: Unable to parse response"
    await drive(provider, leadership, cluster, lambda: said in provider.fleet({}).trouble, hosts={pool: 1})
    faults.cut.clear()
    await drive(provider, leadership, cluster, lambda: moto.instances(pool), hosts={pool: 1})
    assert provider.fleet({}).trouble == ""


async def test_a_refused_change_does_not_hold_up_the_others(
    provider: AwsProvider, leadership: Leadership, cluster: Cluster, faults: Faults, moto: Moto, proxy: Proxy, pool: str
) -> None:
    await drive(provider, leadership, cluster, lambda: moto.instances(pool), hosts={pool: 1})
    (host,) = moto.instances(pool)
    faults.denied = {"SetInstanceProtection"}
    gone = frozenset({host})
    await drive(
        provider, leadership, cluster, lambda: not moto.instances(pool), hosts={pool: 0}, retire=gone, body=host
    )
    assert "SetInstanceProtection" in changes(proxy)


async def test_a_refused_request_for_hosts_makes_the_pool_refuse(
    provider: AwsProvider, leadership: Leadership, cluster: Cluster, faults: Faults, pool: str
) -> None:
    faults.denied = {"SetDesiredCapacity"}
    await drive(provider, leadership, cluster, lambda: provider.fleet({}).report[:1], hosts={})
    await drive(provider, leadership, cluster, lambda: provider.fleet({}).report[0]["error"], hosts={pool: 1})
    (row,) = provider.fleet({}).report
    assert "set_desired_capacity" in row["error"] and "AccessDenied" in row["error"] and row["failures"] == 1
    assert (await cluster.fleet_memory())["pools"][pool]["failures"] == 1


async def test_a_drained_host_is_let_go(
    provider: AwsProvider, leadership: Leadership, cluster: Cluster, faults: Faults, moto: Moto, proxy: Proxy, pool: str
) -> None:
    await drive(provider, leadership, cluster, lambda: moto.instances(pool), hosts={pool: 1})
    (host,) = moto.instances(pool)
    faults.waits.add(host)
    await drive(provider, leadership, cluster, lambda: "CompleteLifecycleAction" in changes(proxy), hosts={pool: 0})
    (form,) = [form for action, form in proxy.calls if action == "CompleteLifecycleAction"]
    assert (form["InstanceId"], form["LifecycleHookName"], form["LifecycleActionResult"]) == (
        host,
        "stoker-drain",
        "CONTINUE",
    )
