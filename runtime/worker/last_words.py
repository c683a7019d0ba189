"""Why a replica that worked is there no more, as its function's log says it."""

from redis.exceptions import RedisError

from stoker.runtime.spec import FunctionSpec
from stoker.runtime.worker.host import Host


async def why_stopped(spec: FunctionSpec, host: Host) -> str:
    if host.leaving:
        return "stopped with its host"
    try:
        deployed = await host.cluster.function(spec.name)
    except RedisError:
        return "stopped"
    if deployed is None:
        return "stopped: its function was deleted"
    if deployed["version"] != spec.version:
        return f"stopped: version {deployed['version']} is deployed now"
    return "went to sleep: there was no work for it"
