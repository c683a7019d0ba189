"""When a waiting job is likely to start: a pure estimate from how fast its queue drains and how long workers start."""

from collections.abc import Mapping, Sequence
from typing import Any

from stoker.queue.records import Backlog, Job
from stoker.runtime.gateway.waiting import Replica, loaded_share

# The controller has seen the start begin.
BEGUN = {"loading", "host_booting"}


def eta_s(
    job: Job,
    backlog: Backlog | None,
    replicas: Sequence[Replica],
    reason: Mapping[str, Any] | None = None,
    *,
    failing: bool = False,
) -> float | None:
    """Seconds, None for what can't be known: no worker ever started, or no job ever ended, or workers fail to start.

    `replicas` are the function's. While one is ready, jobs leave at the rate measured now; while none is, the first
    one has to start, and they will leave at the rate measured last. `reason`: why they wait, as the controller says.
    """
    ahead = job.queued_ahead
    if ahead is None or backlog is None or failing:
        return None
    if any(replica["state"] == "ready" for replica in replicas):
        return seconds_for(ahead + 1, backlog.drained_per_s or backlog.drained_last_per_s)
    waiting_s = seconds_for(ahead, backlog.drained_last_per_s)
    if backlog.cold_start_ms is None or waiting_s is None:
        return None
    if reason and reason["code"] in BEGUN and reason["eta_s"] is not None:
        return reason["eta_s"] + waiting_s
    return backlog.cold_start_ms / 1000 * (1 - loaded_share(replicas)) + waiting_s


def seconds_for(jobs: int, per_second: float) -> float | None:
    if not jobs:
        return 0.0
    return jobs / per_second if per_second > 0 else None
