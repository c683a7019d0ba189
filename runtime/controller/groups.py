"""Auto Scaling groups as AWS describes them, read into what the controller needs: a pool of hosts each."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

CLUSTER_TAG = "stoker:cluster"
POOL_TAG = "stoker:pool"
BOOT_TIMEOUT_S = 600.0
MESSAGE_LIMIT = 200

State = Literal["pending", "running", "leaving"]


@dataclass(frozen=True, slots=True)
class Instance:
    """One member of a group. `waits` while a hook holds its termination until somebody completes it."""

    id: str
    kind: str
    zone: str
    state: State
    healthy: bool = True
    protected: bool = True
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """One pool. `price` is USD per host-hour; `instances` leaves out the warm pool."""

    name: str
    pool: str
    smallest: int
    largest: int
    desired: int
    instances: tuple[Instance, ...] = ()
    gpu: str = ""
    gpus: int = 0
    price: float = 0.0
    spot: bool = False
    boot_timeout_s: float = BOOT_TIMEOUT_S
    kinds: tuple[str, ...] = ()
    zones: tuple[str, ...] = ()

    @property
    def live(self) -> list[Instance]:
        """Those that count for the desired capacity."""
        return [instance for instance in self.instances if instance.state != "leaving"]


@dataclass(frozen=True, slots=True)
class FailedLaunch:
    """A scaling activity that failed to start an instance; `at` is Unix seconds by AWS's clock."""

    id: str
    at: float
    message: str


def read_group(record: Mapping[str, Any]) -> Group | None:
    """From a record of DescribeAutoScalingGroups; None for a group that is no pool (a cluster's gateways are in groups
    too). Raises ValueError for a tag that is no number."""
    tags = {tag["Key"]: tag.get("Value", "") for tag in record.get("Tags", ())}
    if not tags.get(POOL_TAG):
        return None
    gpu = tags.get("stoker:gpu", "")
    policy = record.get("MixedInstancesPolicy") or {}
    share = policy.get("InstancesDistribution", {}).get("OnDemandPercentageAboveBaseCapacity", 100)
    overrides = policy.get("LaunchTemplate", {}).get("Overrides", ())
    return Group(
        name=record["AutoScalingGroupName"],
        pool=tags[POOL_TAG],
        smallest=record["MinSize"],
        largest=record["MaxSize"],
        desired=record["DesiredCapacity"],
        instances=tuple(read_instances(record.get("Instances", ()))),
        gpu="" if gpu == "cpu" else gpu,
        gpus=int(tags.get("stoker:gpus") or 0),
        price=float(tags.get("stoker:price-per-hour") or 0),
        spot=share < 100,
        boot_timeout_s=float(tags.get("stoker:boot-timeout-s") or BOOT_TIMEOUT_S),
        kinds=tuple(override["InstanceType"] for override in overrides if "InstanceType" in override),
        zones=tuple(record.get("AvailabilityZones", ())),
    )


def read_instances(records: Iterable[Mapping[str, Any]]) -> Iterable[Instance]:
    for record in records:
        lifecycle = record["LifecycleState"]
        if lifecycle.startswith("Warmed:"):
            continue
        yield Instance(
            id=record["InstanceId"],
            kind=record.get("InstanceType", ""),
            zone=record.get("AvailabilityZone", ""),
            state=state_of(lifecycle),
            healthy=record.get("HealthStatus", "Healthy").lower() == "healthy",
            protected=record.get("ProtectedFromScaleIn", False),
            waits=lifecycle == "Terminating:Wait",
        )


def state_of(lifecycle: str) -> State:
    if lifecycle.startswith("Pending"):
        return "pending"
    return "running" if lifecycle == "InService" else "leaving"


def read_failed_launches(activities: Iterable[Mapping[str, Any]]) -> list[FailedLaunch]:
    """The failed ones, oldest first, from records of DescribeScalingActivities."""
    found = [
        FailedLaunch(record["ActivityId"], record["StartTime"].timestamp(), record.get("StatusMessage", ""))
        for record in activities
        if record["StatusCode"] == "Failed" and record.get("Description", "").startswith("Launching")
    ]
    return sorted(found, key=lambda launch: launch.at)


def shortage(group: Group, launches: Iterable[FailedLaunch]) -> str:
    """What a person should read about launches that failed."""
    messages = [launch.message for launch in launches]
    if not any(lacks_capacity(message) for message in messages):
        return messages[-1][:MESSAGE_LIMIT] if messages else "no instance was started"
    named = {kind for message in messages for kind in re.findall(r"sufficient (\S+) capacity", message)}
    zones = {zone for message in messages for zone in re.findall(r"requested \((\S+?)\)", message)}
    kinds = sorted(named) or sorted(group.kinds) or [group.pool]
    return f"no capacity for {', '.join(kinds)} in {', '.join(sorted(zones or group.zones))}"


def lacks_capacity(message: str) -> bool:
    return bool(re.search(r"InsufficientInstanceCapacity|UnfulfillableCapacity|sufficient \S+ capacity", message))
