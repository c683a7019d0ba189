from datetime import UTC, datetime
from typing import Any

import pytest

from stoker.runtime.controller.groups import FailedLaunch, Group, Instance, read_failed_launches, read_group, shortage


def record(**more: Any) -> dict[str, Any]:
    tags = {
        "stoker:cluster": "prod",
        "stoker:pool": "l40s",
        "stoker:gpu": "L40S",
        "stoker:gpus": "2",
        "stoker:price-per-hour": "1.86",
        "stoker:boot-timeout-s": "300",
    }
    return {
        "AutoScalingGroupName": "prod-pool-l40s",
        "MinSize": 0,
        "MaxSize": 4,
        "DesiredCapacity": 2,
        "AvailabilityZones": ["a", "b"],
        "Tags": [{"Key": key, "Value": value} for key, value in tags.items()],
        **more,
    }


def member(id: str, lifecycle: str, **more: Any) -> dict[str, Any]:
    facts = {"InstanceId": id, "LifecycleState": lifecycle, "InstanceType": "g6e.xlarge", "AvailabilityZone": "a"}
    return {**facts, "HealthStatus": "Healthy", "ProtectedFromScaleIn": True, **more}


def test_a_group_is_read_with_its_tags_types_and_zones() -> None:
    policy = {
        "LaunchTemplate": {"Overrides": [{"InstanceType": "g6e.xlarge"}, {"InstanceType": "g6e.2xlarge"}]},
        "InstancesDistribution": {"OnDemandPercentageAboveBaseCapacity": 0},
    }
    group = read_group(record(MixedInstancesPolicy=policy))
    assert group == Group(
        "prod-pool-l40s",
        "l40s",
        0,
        4,
        2,
        gpu="L40S",
        gpus=2,
        price=1.86,
        spot=True,
        boot_timeout_s=300.0,
        kinds=("g6e.xlarge", "g6e.2xlarge"),
        zones=("a", "b"),
    )
    plain = read_group(record())
    assert plain is not None and not plain.spot and plain.kinds == ()


def test_a_group_of_the_cluster_that_is_no_pool_is_left_alone() -> None:
    assert read_group(record(Tags=[{"Key": "stoker:cluster", "Value": "prod"}])) is None


def test_a_pool_of_hosts_without_gpus() -> None:
    tags = [{"Key": "stoker:pool", "Value": "small"}, {"Key": "stoker:gpu", "Value": "cpu"}]
    group = read_group(record(Tags=tags))
    assert group is not None and (group.gpu, group.gpus, group.price, group.boot_timeout_s) == ("", 0, 0.0, 600.0)


@pytest.mark.parametrize(
    ("lifecycle", "state", "waits"),
    [
        ("Pending", "pending", False),
        ("Pending:Wait", "pending", False),
        ("InService", "running", False),
        ("Standby", "leaving", False),
        ("Terminating", "leaving", False),
        ("Terminating:Wait", "leaving", True),
        ("Terminating:Proceed", "leaving", False),
    ],
)
def test_lifecycles(lifecycle: str, state: str, waits: bool) -> None:
    group = read_group(record(Instances=[member("i-1", lifecycle, HealthStatus="Unhealthy")]))
    assert group is not None
    assert group.instances == (Instance("i-1", "g6e.xlarge", "a", state, False, True, waits),)  # type: ignore[arg-type]
    assert len(group.live) == (state != "leaving")


def test_hosts_of_the_warm_pool_do_not_count() -> None:
    group = read_group(record(Instances=[member("i-1", "Warmed:Stopped"), member("i-2", "InService")]))
    assert group is not None and [instance.id for instance in group.instances] == ["i-2"]


def activity(id: str, second: int, status: str = "Failed", **more: Any) -> dict[str, Any]:
    at = datetime(2026, 1, 1, 0, 0, second, tzinfo=UTC)
    return {"ActivityId": id, "StartTime": at, "StatusCode": status, "Description": "Launching a new EC2 …", **more}


def test_failed_launches_are_the_failed_ones_oldest_first() -> None:
    ended = activity("4", 5, Description="Terminating EC2 instance: i-1")
    launches = read_failed_launches([activity("3", 9), activity("2", 7, "Successful"), activity("1", 3), ended])
    assert [launch.id for launch in launches] == ["1", "3"]
    assert launches[0].at == datetime(2026, 1, 1, 0, 0, 3, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (
            [
                "We currently do not have sufficient g6e.xlarge capacity in the Availability Zone you requested (a).",
                "We currently do not have sufficient g6e.2xlarge capacity in the Availability Zone you requested (b).",
            ],
            "no capacity for g6e.2xlarge, g6e.xlarge in a, b",
        ),
        (
            ["Could not launch Spot Instances. UnfulfillableCapacity - Unable to fulfill capacity due to your request"],
            "no capacity for g6e.xlarge in a, b",
        ),
        (
            ["You have requested more vCPU capacity than your current vCPU limit of 0 allows for the instance bucket"],
            "You have requested more vCPU capacity than your current vCPU limit of 0 allows for the instance bucket",
        ),
        ([], "no instance was started"),
    ],
    ids=["zones", "spot", "limit", "none"],
)
def test_why_launches_failed_in_words(messages: list[str], said: str) -> None:
    group = Group("g", "p", 0, 1, 1, kinds=("g6e.xlarge",), zones=("a", "b"))
    assert shortage(group, [FailedLaunch(str(n), n, text) for n, text in enumerate(messages)]) == said
