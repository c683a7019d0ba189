"""What a cloud does to a cluster: no capacity, spot interruptions, hosts that never come, an API that goes away; and
controllers killed around each of their calls. No job is lost in any of it."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.e2e.aws_api import CHANGES, until
from tests.e2e.cloud import Cloud

# Each test waits for several hosts, one after the other, and each of those waits says itself what never came.
pytestmark = [pytest.mark.xdist_group("aws-faults"), pytest.mark.timeout(360)]

NOTICE = "spot/instance-action"
# Of the two minutes that are announced all but this much counts as gone (see HAND_BACK_S of the agent).
LEFT_S = 16.0
SCARCE = "no capacity for t3.micro in us-east-1a, us-east-1b"


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    with Cloud(tmp_path_factory.mktemp("aws")) as cloud:
        yield cloud


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """A file that jobs wait for. They end with their test, and so do their hosts."""
    gate = tmp_path / "gate"
    yield gate
    gate.touch()


@pytest.fixture(autouse=True)
def calm(cloud: Cloud) -> Iterator[None]:
    """Each test ends with no host; a pool that refuses is forgiven."""
    yield
    cloud.faults.short.clear()
    until(lambda: cloud.size("cheap", "dear") == 0, "all hosts to go")
    cloud.forgive()


def until_running(cloud: Cloud, job_id: str, not_on: str = "") -> str:
    """The host that runs it."""

    def host() -> str:
        busy = [row["id"] for row in cloud.hosts()["hosts"] if row["replicas"] and row["state"] != "interrupted"]
        return busy[0] if cloud.job(job_id)["state"] == "running" and busy and busy[0] != not_on else ""

    return until(host, "the job to run")


def test_without_capacity_the_next_pool_is_taken_and_the_job_says_why(cloud: Cloud) -> None:
    cloud.faults.short.update(cheap=0, dear=0)
    job_id = cloud.submit("")
    said = until(lambda: (reason := cloud.job(job_id)["wait_reason"] or "") and SCARCE in reason and reason, "a reason")
    assert "next try in" in said
    row = until(lambda: (row := cloud.pool("cheap"))["error"] and row, "the refusal")
    assert row["error"] == SCARCE and row["failures"] == 1 and 0 < row["retry_at"] - time.time() <= 30
    del cloud.faults.short["dear"]
    cloud.forgive("dear")
    cloud.until_done(job_id)
    assert cloud.faults.short["cheap"] == 0, "a pool that refused must not start a second host later"


def test_one_job_outlives_an_interruption_a_crash_and_an_api_that_forgets_everything(cloud: Cloud, gate: Path) -> None:
    job_id = cloud.submit(str(gate))
    first = until_running(cloud, job_id)
    at = datetime.fromtimestamp(time.time() + LEFT_S, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    cloud.faults.notices[first] = {NOTICE: {"action": "terminate", "time": at}}
    second = until_running(cloud, job_id, first)
    assert cloud.job(job_id)["attempt"] == 1, "what is handed back costs no attempt"
    cloud.ec2.crash(second)
    third = until_running(cloud, job_id, second)
    assert cloud.job(job_id)["attempt"] == 2
    cloud.moto.stop()
    assert cloud.job(job_id)["state"] == "running"
    cloud.moto.start()
    cloud.make_pools()
    until_running(cloud, job_id, third)
    gate.touch()
    cloud.until_done(job_id)


def test_a_host_that_never_reports_is_replaced_by_one_of_another_pool(cloud: Cloud) -> None:
    cloud.faults.dead_boots = 1
    cloud.moto.set_boot_timeout("cheap", 2)
    job_id = cloud.submit("")
    dead = until(lambda: cloud.moto.instances("cheap"), "the dead boot")[0]
    cloud.until_done(job_id)
    assert dead not in cloud.moto.instances("cheap")
    until(lambda: cloud.pool("cheap")["error"] == f"host {dead} ended before it reported", "the failure to be shown")
    cloud.moto.set_boot_timeout("cheap", 60)


def test_controllers_killed_around_each_of_their_calls_are_not_missed(cloud: Cloud) -> None:
    killed, hosts = cloud.kills, len(cloud.ec2.started)
    cloud.faults.traps = {call: ["before", "after"] for call in CHANGES} | {"DescribeAutoScalingGroups": ["after"]}
    cloud.until_done(cloud.submit(""))
    until(lambda: cloud.size("cheap", "dear") == 0, "all hosts to go")
    assert not any(cloud.faults.traps.values()) and cloud.kills - killed == 2 * len(CHANGES) + 1
    assert len(cloud.ec2.started) - hosts == 1, "one host is enough for one job"
