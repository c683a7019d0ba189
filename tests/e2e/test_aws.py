"""Hosts from zero and back to zero, with the real controller on a real Auto Scaling API (moto) and real host agents."""

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.aws_api import until
from tests.e2e.cloud import Cloud

pytestmark = pytest.mark.xdist_group("aws")


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    with Cloud(tmp_path_factory.mktemp("aws")) as cloud:
        yield cloud


def metric(cloud: Cloud, line: str) -> float:
    lines = httpx.get(f"{cloud.url}/metrics", trust_env=False).text.splitlines()
    (value,) = [each.removeprefix(line) for each in lines if each.startswith(line)]
    return float(value)


def changes(cloud: Cloud) -> list[str]:
    return [action for action, _ in cloud.proxy.calls if not action.startswith("Describe")]


def test_a_request_takes_the_group_from_zero_to_one_and_back(cloud: Cloud) -> None:
    gate = cloud.folder / "gate"
    assert cloud.size("cheap", "dear") == 0
    job_id = cloud.submit(str(gate))
    until(
        lambda: (cloud.job(job_id)["wait_reason"] or "").startswith("starting host: a host of pool cheap"), "a reason"
    )
    until(lambda: cloud.job(job_id)["state"] == "running", "the job to run")
    (instance,) = cloud.moto.instances("cheap")
    (host,) = json.loads(cloud.command("hosts", "--json"))["hosts"]
    expected = {"id": instance, "pool": "cheap", "state": "ready", "kind": "t3.micro", "zone": "us-east-1a"}
    assert expected.items() <= host.items() and host["replicas"] == 1
    assert instance in (table := cloud.command("hosts")) and "cheap" in table and "1 ready" in table
    assert metric(cloud, 'stoker_pool_hosts{pool="cheap",state="ready"}') == 1
    assert metric(cloud, 'stoker_pool_desired_hosts{pool="cheap"}') == 1
    gate.touch()
    assert cloud.until_done(job_id)["result"] == str(gate)
    until(lambda: cloud.size("cheap", "dear") == 0, "the host to go")
    assert cloud.ec2.started == [instance]
    done = changes(cloud)
    assert done.count("SetDesiredCapacity") == done.count("TerminateInstanceInAutoScalingGroup") == 1
    looks = len(cloud.proxy.calls)
    until(lambda: len(cloud.proxy.calls) >= looks + 2, "two more looks")
    assert changes(cloud) == done, "without work nothing is asked for"
