"""Which version calls are checked against: what is deployed, unless that fails to start and an older one serves."""

from stoker.runtime.gateway.cluster_view import Snapshot
from stoker.runtime.gateway.context import Gateway
from stoker.runtime.spec import FunctionSpec, InvalidSpec


async def serving(gateway: Gateway, deployed: FunctionSpec) -> FunctionSpec:
    return serving_in(await gateway.view.snapshot(), deployed)


def serving_in(view: Snapshot, deployed: FunctionSpec) -> FunctionSpec:
    rollout = view.fleet.get("rollouts", {}).get(deployed.name, {})
    proven = view.proven.get(deployed.name, {})
    if rollout.get("version") != deployed.version or not rollout["serving"]:
        return deployed
    if (proven.get("version"), proven.get("born")) != (rollout["serving"], deployed.born):
        return deployed
    try:
        return FunctionSpec.from_dict(dict(proven))
    except InvalidSpec:
        return deployed
