"""The part of /openapi.json that depends on who reads it: functions that they may call, with what each one takes."""

import contextlib
from typing import Any

from stoker.runtime.gateway.endpoint import Incoming
from stoker.runtime.gateway.errors import ApiError
from stoker.runtime.spec import FunctionSpec, short_name

Json = dict[str, Any]

CALL = "/v1/functions/{name}"
SCHEMAS = "#/components/schemas/"


async def visible_functions(incoming: Incoming) -> list[FunctionSpec]:
    """Those that say what they take. A wrong key reads what anyone may read."""
    gateway, caller = incoming.gateway, incoming.caller
    if incoming.headers.get("authorization"):
        with contextlib.suppress(ApiError):
            caller = await gateway.doorkeeper.admit(incoming.headers, "invoke")
    functions = (await gateway.registry.visible(caller)).values() if "invoke" in caller.scopes else ()
    return [spec for spec in functions if spec.input_schema is not None]


def with_functions(document: Json, specs: list[FunctionSpec]) -> Json:
    call = document["paths"][CALL]["post"]
    names = {short_name(spec.name): spec for spec in specs}
    paths = {CALL.format(name=name): {"post": call_of(call, name)} for name in names}
    schemas = {f"{name}.input": rooted(spec.input_schema, f"{SCHEMAS}{name}.input") for name, spec in names.items()}
    components = {**document["components"], "schemas": {**document["components"]["schemas"], **schemas}}
    return {**document, "paths": {**document["paths"], **paths}, "components": components}


def call_of(call: Json, name: str) -> Json:
    json = {"application/json": {"schema": {"$ref": f"{SCHEMAS}{name}.input"}}}
    content = {**call["requestBody"]["content"], **json}
    return {
        **call,
        "operationId": f"invoke_{name}",
        "summary": f"Call '{name}' and wait for its result.",
        "parameters": [each for each in call["parameters"] if each["in"] != "path"],
        "requestBody": {"required": True, "content": content},
    }


def rooted(value: Any, root: str) -> Any:
    """A schema whose references within itself hold where it stands under `root`."""
    if isinstance(value, list):
        return [rooted(part, root) for part in value]
    if not isinstance(value, dict):
        return value
    parts = {name: rooted(part, root) for name, part in value.items()}
    reference = parts.get("$ref")
    return {**parts, "$ref": root + reference[1:]} if isinstance(reference, str) and reference[:1] == "#" else parts
