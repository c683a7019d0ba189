"""Calls to EC2 Auto Scaling: blocking ones, so each runs in a thread, and each with a time limit."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from stoker.runtime.controller.groups import (
    CLUSTER_TAG,
    FailedLaunch,
    Group,
    read_failed_launches,
    read_group,
)
from stoker.runtime.controller.leader import NotLeading

CONNECT_S = 1.0
LOOK_READ_S = 5.0
LOOK_ATTEMPTS = 3
# A change is tried once: the next turn looks at what became of it and tries again if need be.
CHANGE_READ_S = 3.0
CHANGE_S = CONNECT_S + CHANGE_READ_S
DRAIN_HOOK = "stoker-drain"
ACTIVITIES = 20

T = TypeVar("T")


class CloudError(Exception):
    """AWS didn't do what was asked; the message names the operation. `refusal`: it said no, and will again."""

    def __init__(self, message: str, *, refusal: bool = False) -> None:
        super().__init__(message)
        self.refusal = refusal


class AutoScaling:
    """The groups with the tag `stoker:cluster` = `cluster`. Every method raises CloudError."""

    def __init__(self, cluster: str) -> None:
        self._filter = [{"Name": f"tag:{CLUSTER_TAG}", "Values": [cluster]}]
        self._looks = make_client(LOOK_READ_S, LOOK_ATTEMPTS)
        self._changes = make_client(CHANGE_READ_S, 1)

    async def groups(self) -> list[Group]:
        return await in_thread("DescribeAutoScalingGroups", self._read_groups)

    async def failed_launches(self, group: str) -> list[FailedLaunch]:
        """Among the latest activities, the oldest first."""

        def look() -> list[FailedLaunch]:
            answer = self._looks.describe_scaling_activities(AutoScalingGroupName=group, MaxRecords=ACTIVITIES)
            return read_failed_launches(answer["Activities"])

        return await in_thread("DescribeScalingActivities", look)

    async def set_desired(self, group: str, hosts: int, begin_by: float) -> None:
        await self._change("set_desired_capacity", begin_by, AutoScalingGroupName=group, DesiredCapacity=hosts)

    async def protect(self, group: str, instances: list[str], protected: bool, begin_by: float) -> None:
        facts = {"AutoScalingGroupName": group, "InstanceIds": instances, "ProtectedFromScaleIn": protected}
        await self._change("set_instance_protection", begin_by, **facts)

    async def terminate(self, instance: str, begin_by: float) -> None:
        """The group then wants one host less."""
        facts = {"InstanceId": instance, "ShouldDecrementDesiredCapacity": True}
        await self._change("terminate_instance_in_auto_scaling_group", begin_by, **facts)

    async def let_go(self, group: str, instance: str, begin_by: float) -> None:
        """Ends the wait of an instance that has drained."""
        facts = {"AutoScalingGroupName": group, "InstanceId": instance, "LifecycleHookName": DRAIN_HOOK}
        await self._change("complete_lifecycle_action", begin_by, LifecycleActionResult="CONTINUE", **facts)

    def _read_groups(self) -> list[Group]:
        pages = self._looks.get_paginator("describe_auto_scaling_groups").paginate(Filters=self._filter)
        found = [read_group(record) for page in pages for record in page["AutoScalingGroups"]]
        return [group for group in found if group is not None]

    async def _change(self, operation: str, begin_by: float, **facts: Any) -> None:
        def change() -> None:
            if time.monotonic() > begin_by:
                raise NotLeading(f"{operation} came too late for the lease")
            getattr(self._changes, operation)(**facts)

        await in_thread(operation, change)


async def in_thread(operation: str, call: Callable[[], T]) -> T:
    try:
        return await asyncio.to_thread(call)
    except ClientError as error:
        raise CloudError(f"{operation}: {error}", refusal=is_refusal(error)) from error
    except (BotoCoreError, ResponseParserError, ValueError) as error:
        raise CloudError(f"{operation}: {error}") from error


def is_refusal(error: ClientError) -> bool:
    """Not for what a later try may get through: throttling, faults of the service."""
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = error.response.get("Error", {}).get("Code", "")
    return 400 <= status < 500 and status != 429 and "Throttl" not in code and code != "RequestLimitExceeded"


def make_client(read_s: float, attempts: int) -> Any:
    retries = {"mode": "standard", "total_max_attempts": attempts}
    return boto3.client("autoscaling", config=Config(connect_timeout=CONNECT_S, read_timeout=read_s, retries=retries))
