"""/openapi.json, made from the route table and the types of requests and answers."""

import re
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from stoker.runtime.gateway.endpoint import Endpoint
from stoker.runtime.gateway.errors import ErrorBody

Json = dict[str, Any]

REF = "#/components/schemas/{model}"
PARAMETER = re.compile(r"{(\w+)}")
FUNCTION_JOB = "/v1/functions/{name}/jobs/{id}"
COMMON_PROBLEMS: Mapping[int, str] = {
    400: "The request is malformed or asks for something that can't be done.",
    413: "The body is too large.",
    503: "The queue can't be reached; see Retry-After.",
}
KEY_PROBLEMS: Mapping[int, str] = {
    401: "There is no API key, or not a right one.",
    403: "The API key lacks the scope that this needs.",
}


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
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def describe_operation(endpoint: Endpoint, error: Json, schemas: dict[str, Json]) -> Json:
    problems = {**COMMON_PROBLEMS, **({} if endpoint.access == "anyone" else KEY_PROBLEMS), **endpoint.problems}
    answers = {str(status): problem(text, error) for status, text in problems.items()}
    for status, kind in {endpoint.status: endpoint.answer, **endpoint.others}.items():
        answers[str(status)] = success(kind, endpoint.media, schemas)
    operation: Json = {
        "operationId": operation_id(endpoint),
        "summary": endpoint.summary,
        "tags": [endpoint.tag],
        "parameters": parameters(endpoint),
        "responses": answers,
    }
    if endpoint.access == "anyone":
        operation["security"] = []
    if endpoint.streams_body:
        operation["requestBody"] = {"required": True, "content": {"application/octet-stream": {}}}
    elif endpoint.request is not None:
        body = reference(endpoint.request, schemas, "validation")
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation


def operation_id(endpoint: Endpoint) -> str:
    """The handler's name; a job that is reached through its function has the same handlers as one by its own id."""
    name = endpoint.handler.__name__
    return f"{name}_of_function" if endpoint.path == FUNCTION_JOB and endpoint.method in ("GET", "DELETE") else name


def success(kind: Any, media: str, schemas: dict[str, Json]) -> Json:
    content = {} if kind is None else {"schema": reference(kind, schemas, "serialization")}
    return {"description": "Done.", "content": {media: content}}


def problem(text: str, error: Json) -> Json:
    return {"description": text, "content": {"application/json": {"schema": error}}}


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
