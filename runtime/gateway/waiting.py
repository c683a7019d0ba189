"""Why a job that isn't running yet waits: a pure reading of its record, its queue and the hosts' last reports."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stoker.queue.records import Backlog, Job, JobState

WAITING = {JobState.QUEUED, JobState.RETRYING}
QUEUED = "queued"
MESSAGE_LIMIT = 200
WANTS_HOST = {"host_booting", "no_capacity", "no_fitting_pool", "max_hosts"}

Replica = Mapping[str, Any]


def wait_reason(
    job: Job,
    backlog: Backlog | None,
    hosts: Sequence[Mapping[str, Any]],
    wanted_hosts: int = 0,
    failing: Mapping[str, Any] | None = None,
    needs_gpu: bool = False,
    reason: Mapping[str, Any] | None = None,
) -> str:
    """ "" for a job that runs or has ended.

    `hosts` are report bodies (see the host agent); `wanted_hosts` is how many the controller asked its provider for;
    `failing` is the controller's note about this function's failed starts, `reason` what it says about its hosts.
    """
    if job.state not in WAITING:
        return ""
    replicas = replicas_of(hosts, job.function)
    states = {replica["state"] for replica in replicas}
    if "ready" in states:
        return position(job, backlog)
    if "loading" in states:
        return loading(replicas)
    if "starting" in states:
        return "starting worker"
    if failing or "failed" in states:
        return f"worker failing: {failure(replicas, failing)}"
    if not hosts and wanted_hosts:
        return "starting host"
    if reason and reason["code"] in WANTS_HOST:
        return f"starting host: {reason['message']}" if reason["code"] == "host_booting" else reason["message"]
    if not hosts:
        return "no host available"
    if needs_gpu and all(host["device"] == "cpu" for host in hosts):
        return "no host with a GPU available"
    return "restarting after a lost attempt" if job.state is JobState.RETRYING else QUEUED


def of_version(host: Mapping[str, Any], version: str) -> Mapping[str, Any]:
    """The host's report, with the replicas of this version alone."""
    return {**host, "replicas": {id: each for id, each in host["replicas"].items() if each["version"] == version}}


def why_aside(version: str, reason: str) -> str:
    """Of a job that a replica of another version keeps for the deployed one; `reason`: how that one stands."""
    said = f"its input is for version {version}, which does not serve yet"
    return said if reason == QUEUED else f"{said}: {reason}"


def replicas_of(hosts: Iterable[Mapping[str, Any]], function: str) -> list[Replica]:
    return [replica for host in hosts for replica in host["replicas"].values() if replica["function"] == function]


def position(job: Job, backlog: Backlog | None) -> str:
    if job.state is JobState.RETRYING:
        return f"retrying (attempt {job.attempt + 1} of {job.max_attempts})"
    if not job.queued_ahead or backlog is None:
        return QUEUED
    # The backlog may be a second old.
    return f"queued behind {job.queued_ahead} of {max(backlog.queued, job.queued_ahead + 1)}"


def loading(replicas: Sequence[Replica]) -> str:
    """What a model's replica loads is its weights; a Python function's says what it does (`step`)."""
    starting = [replica for replica in replicas if replica["state"] == "loading"]
    if any(replica["total_bytes"] for replica in starting):
        return f"loading weights {int(100 * loaded_share(starting))} %"
    step = next((replica["step"] for replica in starting if replica.get("step")), "")
    return f"starting worker: {step}" if step else "loading weights"


def loaded_share(replicas: Iterable[Replica]) -> float:
    """Of the weights, 0 to 1, by the replica that is furthest: it will answer first."""
    loading = [replica for replica in replicas if replica["state"] == "loading" and replica["total_bytes"]]
    return max((replica["loaded_bytes"] / replica["total_bytes"] for replica in loading), default=0.0)


def failure(replicas: Iterable[Replica], failing: Mapping[str, Any] | None) -> str:
    errors = [replica["error"] for replica in replicas if replica["state"] == "failed" and replica.get("error")]
    errors = errors or ([failing["error"]] if failing and failing["error"] else [])
    return str(errors[-1].get("message") or errors[-1].get("type"))[:MESSAGE_LIMIT] if errors else "no reason reported"
