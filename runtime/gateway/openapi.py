"""/openapi.json, made from the route table and the types of requests and answers."""

import re
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from stoker.runtime.client.media import MSGPACK
from stoker.runtime.gateway.endpoint import EVENT_STREAM, Endpoint
from stoker.runtime.gateway.errors import ErrorBody

Json = dict[str, Any]

REF = "#/components/schemas/{model}"
PARAMETER = re.compile(r"{(\w+)}")
FUNCTION_JOB = "/v1/functions/{name}/jobs/{id}"
COMMON_PROBLEMS: Mapping[int, str] = {
    400: "The request is malformed or asks for something that can't be done.",
    408: "The body didn't arrive in time.",
    413: "The body is too large.",
    500: "The gateway or the function failed.",
    503: "The queue, the object store or the function's workers are out of reach; see Retry-After.",
}
HEADERS: Mapping[str, str] = {
    "x-request-id": "The request's own x-request-id, or one made for it; stands in the logs too.",
    "x-job-id": "The job behind this answer, where there is one.",
    "openai-processing-ms": "Milliseconds from the request's arrival to the beginning of its answer.",
    **{
        f"x-ratelimit-{what}-{kind}": f"{meaning} {kind} per minute, where the tenant has such a limit."
        for kind in ("requests", "tokens")
        for what, meaning in (
            ("limit", "Most"),
            ("remaining", "What is left now of the"),
            ("reset", "When all are back:"),
        )
    },
    "retry-after": "Seconds after which it makes sense to ask again.",
}
ALWAYS = tuple(name for name in HEADERS if name != "retry-after")
KEY_PROBLEMS: Mapping[int, str] = {
    401: "There is no API key, or not a right one.",
    403: "The API key lacks the scope that this needs.",
}
SHARED = {**COMMON_PROBLEMS, **KEY_PROBLEMS}


def describe(endpoints: Iterable[Endpoint]) -> Json:
    """The OpenAPI 3.1 document."""
    schemas: dict[str, Json] = {}
    error = reference(ErrorBody, schemas, "serialization")
    paths: dict[str, Json] = {}
    for endpoint in endpoints:
        operation = describe_operation(endpoint, error, schemas)
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "stoker", "version": version("stoker"), "description": "Serverless GPU functions over HTTP."},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {f"Problem{status}": problem(status, text, error) for status, text in SHARED.items()},
            "headers": {name: {"description": text, "schema": {"type": "string"}} for name, text in HEADERS.items()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def describe_operation(endpoint: Endpoint, error: Json, schemas: dict[str, Json]) -> Json:
    problems = {**COMMON_PROBLEMS, **({} if endpoint.access == "anyone" else KEY_PROBLEMS), **endpoint.problems}
    answers = {
        str(status): shared_problem(status, text) or problem(status, text, error) for status, text in problems.items()
    }
    for status, kind in endpoint.others.items():
        answers[str(status)] = success(media_types(endpoint, status, kind), schemas)
    kinds = media_types(endpoint, endpoint.status, endpoint.answer)
    kinds |= {EVENT_STREAM: endpoint.events} if endpoint.events else {}
    answers[str(endpoint.status)] = success(kinds, schemas)
    operation: Json = {
        "operationId": operation_id(endpoint),
        "summary": endpoint.summary,
        "tags": [endpoint.tag],
        "parameters": parameters(endpoint),
        "responses": answers,
    }
    if endpoint.access == "anyone":
        operation["security"] = []
    if endpoint.streams_body or endpoint.request is not None:
        operation["requestBody"] = {"required": True, "content": body_content(endpoint, schemas)}
    return operation


def operation_id(endpoint: Endpoint) -> str:
    """The handler's name; a job that is reached through its function has the same handlers as one by its own id."""
    name = endpoint.handler.__name__
    return f"{name}_of_function" if endpoint.path == FUNCTION_JOB and endpoint.method in ("GET", "DELETE") else name


def media_types(endpoint: Endpoint, status: int, kind: Any) -> dict[str, Any]:
    return {endpoint.media: kind} | ({MSGPACK: kind} if endpoint.packs and status == 200 else {})


def body_content(endpoint: Endpoint, schemas: dict[str, Json]) -> Json:
    """Raw bytes, a form, or JSON (where msgpack may stand for it)."""
    if endpoint.streams_body and endpoint.request is None:
        return {"application/octet-stream": {}}
    body = reference(endpoint.request, schemas, "validation")
    content = {"multipart/form-data" if endpoint.streams_body else "application/json": {"schema": body}}
    return content | ({MSGPACK: {"schema": body}} if endpoint.packs else {})


def success(kinds: Mapping[str, Any], schemas: dict[str, Json]) -> Json:
    content: Json = {}
    for media, kind in kinds.items():
        schema = None if kind is None else reference(kind, schemas, "serialization")
        content[media] = {} if schema is None else {"schema": event_schema(schema) if media == EVENT_STREAM else schema}
    return {"description": "Done.", "headers": header_references(*ALWAYS), "content": content}


def event_schema(data: Json) -> Json:
    """Of one event of a stream, the last of which may be an error."""
    text = {"type": "string"}
    json = {"anyOf": [data, {"$ref": REF.format(model=ErrorBody.__name__)}]}
    json_text = {**text, "contentMediaType": "application/json", "contentSchema": json}
    properties = {"data": {"anyOf": [{"const": "[DONE]"}, json_text]}, "event": text, "id": text}
    return {"type": "object", "required": ["data"], "properties": properties}


def problem(status: int, text: str, error: Json) -> Json:
    headers = header_references(*ALWAYS, *(["retry-after"] if status in (429, 503) else []))
    return {"description": text, "headers": headers, "content": {"application/json": {"schema": error}}}


def shared_problem(status: int, text: str) -> Json | None:
    """What most routes say alike stands once in the document."""
    return {"$ref": f"#/components/responses/Problem{status}"} if SHARED.get(status) == text else None


def header_references(*names: str) -> Json:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def parameters(endpoint: Endpoint) -> list[Json]:
    text = {"type": "string"}
    path = [{"name": name, "in": "path", "required": True, "schema": text} for name in PARAMETER.findall(endpoint.path)]
    return path + [
        {"name": name, "in": place, "description": meaning, "schema": text}
        for place, meanings in (("header", endpoint.reads), ("query", endpoint.asks))
        for name, meaning in meanings.items()
    ]


def reference(kind: Any, schemas: dict[str, Json], mode: JsonSchemaMode) -> Json:
    """The schema of `kind`; the definitions it needs go into `schemas`."""
    schema = TypeAdapter(kind).json_schema(mode=mode, ref_template=REF)
    schemas.update(schema.pop("$defs", {}))
    if "title" not in schema or schema.get("type") != "object":
        return schema
    schemas[schema["title"]] = schema
    return {"$ref": REF.format(model=schema["title"])}
