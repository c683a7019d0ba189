"""Deploying a whole app: all of its functions are checked, then all of them change in one step."""

from typing import Any, Literal

from starlette.responses import Response
from typing_extensions import TypedDict

from stoker.runtime.gateway.auth import Caller
from stoker.runtime.gateway.deploy_routes import (
    FunctionObject,
    forget,
    function_object,
    prepare,
    remember,
    spec_of,
)
from stoker.runtime.gateway.endpoint import Incoming, Json
from stoker.runtime.gateway.errors import ApiError, bad_request
from stoker.runtime.spec import FunctionSpec, owner_of, short_name


class AppRequest(TypedDict):
    functions: list[dict[str, Any]]


class AppObject(TypedDict):
    """`deleted` names functions that an earlier version of the app had."""

    object: Literal["app"]
    name: str
    functions: list[FunctionObject]
    deleted: list[str]


async def put_app(incoming: Incoming) -> Response:
    name, gateway, owner = incoming.path("name"), incoming.gateway, incoming.caller.owner
    specs = specs_of(incoming.caller, name, incoming.object().get("functions"))
    deployed = {full: spec for full, spec in (await gateway.registry.all()).items() if owner_of(full) == owner}
    refuse_foreign(name, specs, deployed)
    prepared = [await prepare(gateway, spec) for spec in specs]
    kept = {spec.name for spec, _ in prepared}
    deleted = sorted(old.name for old in deployed.values() if old.app == name and old.name not in kept)
    prepared = [(await gateway.registry.with_birth(spec), encoder) for spec, encoder in prepared]
    for spec, encoder in prepared:
        await remember(gateway, spec, encoder)
    await gateway.registry.replace([spec for spec, _ in prepared], deleted)
    for function in deleted:
        await forget(gateway, function)
    view = await gateway.view.snapshot()
    functions = [function_object(spec, view) for spec, _ in prepared]
    gone = [short_name(function) for function in deleted]
    return Json({"object": "app", "name": name, "functions": functions, "deleted": gone})


def specs_of(caller: Caller, app: str, functions: Any) -> list[FunctionSpec]:
    if not isinstance(functions, list) or not functions or not all(isinstance(fields, dict) for fields in functions):
        raise bad_request("'functions' must be a list of at least one function's spec.", param="functions")
    specs = [spec_of(caller, str(fields.get("name", "")), {"spec": {**fields, "app": app}}) for fields in functions]
    if len({spec.name for spec in specs}) < len(specs):
        raise bad_request("Two functions of the app have the same name.", param="functions")
    return specs


def refuse_foreign(app: str, specs: list[FunctionSpec], deployed: dict[str, FunctionSpec]) -> None:
    """Names are shared by all apps of a tenant, so one app must not replace another's function by accident."""
    for spec in specs:
        owner = deployed[spec.name].app if spec.name in deployed else app
        if owner != app:
            raise ApiError(
                409,
                f"Function '{short_name(spec.name)}' belongs to app '{owner}': choose another name, "
                "or delete it there first.",
                type="invalid_request_error",
                param="functions",
                code="function_exists",
            )
