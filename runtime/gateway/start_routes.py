"""Trying whether a deployed function starts, without a call."""

from starlette.responses import Response

from stoker.runtime.gateway.deploy_routes import FunctionObject, function_object
from stoker.runtime.gateway.endpoint import Endpoint, Incoming, Json


async def start_function(incoming: Incoming) -> Response:
    """A version that was ready once needs no trial."""
    gateway = incoming.gateway
    spec = await gateway.registry.own(incoming.caller, incoming.path("name"))
    proven = (await gateway.cluster.proven()).get(spec.name, {})
    if (proven.get("version"), proven.get("born")) != (spec.version, spec.born):
        await gateway.cluster.ask_start(spec.name)
    return Json(function_object(spec, await gateway.view.snapshot()), status_code=202)


START_ENDPOINTS = [
    Endpoint(
        "POST",
        "/v1/functions/{name}/start",
        start_function,
        "deploy",
        "Start a replica of a version that was never ready, to learn whether it starts; then it sleeps when idle.",
        "Functions",
        answer=FunctionObject,
        status=202,
        problems={404: "There is no such function."},
    ),
]
