"""Deploying a whole app: all of its functions are checked, then all of them change in one step."""

from typing import Any, Literal

from starlette.responses import Response
from typing_extensions import TypedDict

from stoker.runtime.gateway.auth import Caller
from stoker.runtime.gateway.context import Gateway
from stoker.runtime.gateway.deploy_routes import (
    FunctionObject,
    function_object,
    keep_limits,
    prepare,
    remember,
    spec_of,
)
from stoker.runtime.gateway.endpoint import Incoming, Json
from stoker.runtime.gateway.errors import bad_request
from stoker.runtime.gateway.releasing import Made, make_current, refuse_foreign, remove
from stoker.runtime.gateway.route_lessons import teach
from stoker.runtime.gateway.routing import check_routers
from stoker.runtime.spec import FunctionSpec, InvalidSpec, check_name, short_name


class AppRequest(TypedDict):
    functions: list[dict[str, Any]]


class AppObject(TypedDict):
    """`deleted` names functions that the version before it had; `cancelled_jobs` of theirs were queued or ran."""

    object: Literal["app"]
    name: str
    version: str
    functions: list[FunctionObject]
    deleted: list[str]
    cancelled_jobs: int


class DeletedApp(TypedDict):
    """`functions` names those that it had; `cancelled_jobs` of theirs were queued or ran."""

    object: Literal["app"]
    name: str
    deleted: Literal[True]
    functions: list[str]
    cancelled_jobs: int


async def put_app(incoming: Incoming) -> Response:
    name, gateway = incoming.path("name"), incoming.gateway
    check_app(name, "name")
    specs = await specs_of(gateway, incoming.caller, name, incoming.object().get("functions"))
    refuse_foreign(name, specs, await gateway.registry.all())
    check_routers(specs, await gateway.registry.visible(incoming.caller))
    prepared = [await prepare(gateway, spec) for spec in specs]
    made = await make_current(gateway, incoming.caller, name, prepared)
    await teach(gateway, incoming.caller, made.specs)
    return Json(await app_object(gateway, name, made))


async def delete_app(incoming: Incoming) -> Response:
    name = incoming.path("name")
    functions, cancelled_jobs = await remove(incoming.gateway, incoming.caller, name)
    answer: DeletedApp = {
        "object": "app",
        "name": name,
        "deleted": True,
        "functions": [short_name(function) for function in functions],
        "cancelled_jobs": cancelled_jobs,
    }
    return Json(answer)


async def app_object(gateway: Gateway, name: str, made: Made) -> AppObject:
    view = await gateway.view.snapshot()
    return {
        "object": "app",
        "name": name,
        "version": made.release.version,
        "functions": [function_object(spec, view) for spec in made.specs],
        "deleted": [short_name(function) for function in made.deleted],
        "cancelled_jobs": made.cancelled_jobs,
    }


async def put_function(incoming: Incoming) -> Response:
    """As a part of an app it makes a new version of that; a function on its own has no history."""
    gateway, caller = incoming.gateway, incoming.caller
    spec, encoder = await prepare(gateway, await spec_of(gateway, caller, incoming.path("name"), incoming.object()))
    check_routers([spec], await gateway.registry.visible(caller))
    deployed = await gateway.registry.all()
    if spec.app:
        check_app(spec.app, "spec.app")
        made = await make_current(gateway, caller, spec.app, [(spec, encoder)], whole=False)
        spec = next(each for each in made.specs if each.name == spec.name)
    else:
        await remember(gateway, spec, encoder)
        spec = await gateway.registry.put(spec)
        await keep_limits(gateway, spec.name)
    await teach(gateway, caller, [spec])
    answer = function_object(spec, await gateway.view.snapshot())
    return Json(answer, status_code=200 if spec.name in deployed else 201)


def check_app(name: str, param: str) -> None:
    try:
        check_name(name, "app")
    except InvalidSpec as error:
        raise bad_request(f"{error}.", param=param) from None


async def specs_of(gateway: Gateway, caller: Caller, app: str, functions: Any) -> list[FunctionSpec]:
    if not isinstance(functions, list) or not functions or not all(isinstance(fields, dict) for fields in functions):
        raise bad_request("'functions' must be a list of at least one function's spec.", param="functions")
    named = [(str(fields.get("name", "")), {"spec": {**fields, "app": app}}) for fields in functions]
    specs = [await spec_of(gateway, caller, name, body) for name, body in named]
    if len({spec.name for spec in specs}) < len(specs):
        raise bad_request("Two functions of the app have the same name.", param="functions")
    return specs
