"""What the controller tells gateways and people about hosts: pools, hosts, why functions wait for them, and
which versions fail to start."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from stoker.queue.cluster import Cluster, Host
from stoker.runtime.controller.policy_rollout import Rollout
from stoker.runtime.controller.policy_state import Reason
from stoker.runtime.controller.provider import Fleet

REPEAT_S = 5.0
# Reasons that a host which can't be had explains better.
WANTS_HOST = {"host_booting", "no_capacity", "no_fitting_pool", "max_hosts"}

Report = dict[str, Any]


def fleet_report(
    fleet: Fleet, hosts: Mapping[str, Host], reasons: Mapping[str, Reason], rollouts: Mapping[str, Rollout]
) -> Report:
    """A host that reports without being listed by any pool is shown too: it has state "unlisted"."""
    listed = {machine.id: machine for machine in fleet.machines}
    rows = [host_row(machine.id, machine.pool, machine.state, hosts.get(machine.id)) for machine in fleet.machines]
    lone = "unlisted" if fleet.report else "ready"
    rows += [host_row(id, host.body.get("pool", ""), lone, host) for id, host in hosts.items() if id not in listed]
    return {
        "pools": [dict(row) for row in fleet.report],
        "hosts": rows,
        "reasons": {name: reason_row(reason, fleet.trouble) for name, reason in reasons.items()},
        "rollouts": {name: asdict(rollout) for name, rollout in rollouts.items()},
        "trouble": fleet.trouble,
    }


def host_row(id: str, pool: str, state: str, host: Host | None) -> dict[str, Any]:
    body = host.body if host else {}
    return {
        "id": id,
        "pool": pool,
        "state": state,
        "kind": body.get("kind", ""),
        "zone": body.get("zone", ""),
        "spot": body.get("spot", False),
        "devices": list(body.get("devices", ())),
        "gpus": list(body.get("gpus", ())),
        "replicas": len(body.get("replicas", ())),
        "notice": body.get("notice"),
    }


def reason_row(reason: Reason, trouble: str) -> dict[str, Any]:
    row = asdict(reason)
    if trouble and reason.code in WANTS_HOST:
        row["message"] = f"{reason.message} ({trouble})"
    return row


class Told:
    """The last report: one that says the same is only repeated before it would be forgotten."""

    def __init__(self) -> None:
        self._report: Report = {}
        self._at = 0.0

    async def tell(self, cluster: Cluster, report: Report) -> None:
        if report != self._report or time.monotonic() - self._at > REPEAT_S:
            await cluster.report_fleet(report)
            self._report, self._at = report, time.monotonic()
