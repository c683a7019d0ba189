"""The input of a function's call: read from JSON or msgpack, and checked against what the function's annotations say,
before anything wakes."""

import base64
import binascii
import json
import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import msgpack
from jsonschema_rs import Draft202012Validator, RegexOptions, ValidationError, ValidationErrorKind

from stoker.runtime.arrays import EXT_CODE, BadArray, head_of
from stoker.runtime.client.media import ARRAY, BYTES
from stoker.runtime.gateway.endpoint import Incoming
from stoker.runtime.gateway.errors import ApiError, bad_request
from stoker.runtime.gateway.formats import FORMATS
from stoker.runtime.gateway.media import is_msgpack
from stoker.runtime.inputs import MAX_SCHEMA
from stoker.runtime.spec import FunctionSpec, InvalidSpec

MOST_KNOWN = 10_000
MOST_COMPLAINTS = 20
MAX_DEPTH = 100
MESSAGE_CHARACTERS = 300
BYTES_MARK = f'"{BYTES}"'.encode()
# Stand in for numbers that no JSON has: no integers, and as great as such numbers get.
INFINITE, NOT_A_NUMBER = 2.0**52 - 0.5, 2.0**52 - 1.5
SAID = {str(INFINITE): "Infinity", str(NOT_A_NUMBER): "NaN"}


class InputChecks:
    """Compiled schemas of functions, by full name."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[dict[str, Any], Draft202012Validator]] = {}

    def check(self, spec: FunctionSpec, value: Any) -> None:
        """Raises ApiError 422 that names what doesn't fit. `value` is as JSON has it."""
        if spec.input_schema is None:
            return
        complaints = self._complaints(spec, value)
        if complaints:
            # The validator takes 1e999 for null.
            value = as_json(value)
            complaints = self._complaints(spec, value)
        if complaints:
            raise unfit(spec.input_schema, value, complaints)

    def _complaints(self, spec: FunctionSpec, value: Any) -> list[ValidationError]:
        return list(islice(self._validator(spec).iter_errors(value), MOST_COMPLAINTS))

    def _validator(self, spec: FunctionSpec) -> Draft202012Validator:
        assert spec.input_schema is not None
        schema, validator = self._known.get(spec.name, (None, None))
        if validator is None or schema != spec.input_schema:
            validator = compiled(spec.input_schema)
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[spec.name] = (spec.input_schema, validator)
        return validator


def compiled(schema: dict[str, Any]) -> Draft202012Validator:
    """A tenant wrote it: it fetches nothing, and its patterns take linear time. Raises InvalidSpec."""
    try:
        return Draft202012Validator(
            schema,
            retriever=refuse,
            pattern_options=RegexOptions(),
            validate_formats=True,
            formats=dict(FORMATS),
        )
    except (ValidationError, ValueError) as error:
        raise InvalidSpec(f"input_schema is no JSON Schema (2020-12): {str(error).splitlines()[0]}") from None


def check_schema(schema: dict[str, Any] | None) -> None:
    """Of a function that is deployed. Raises InvalidSpec."""
    if schema is None:
        return
    if len(json.dumps(schema)) > MAX_SCHEMA:
        raise InvalidSpec(f"input_schema has more than {MAX_SCHEMA >> 10} KiB")
    compiled(schema)


def refuse(url: str) -> Any:
    raise ValueError(f"it refers to {url}; define everything under $defs")


def call_input(incoming: Incoming, checks: InputChecks, spec: FunctionSpec) -> Any:
    """What the worker gets. Raises ApiError 400 for a body that can't be read, 422 for one that doesn't fit."""
    if is_msgpack(incoming.headers):
        value = from_msgpack(incoming.body)
        if spec.input_schema is not None:
            checks.check(spec, as_json(value))
        return value
    value = incoming.json()
    checks.check(spec, value)
    return with_bytes(value) if BYTES_MARK in incoming.body else value


def from_msgpack(body: bytes) -> Any:
    """Raises ApiError 400."""
    if not body:
        return None
    try:
        value = msgpack.unpackb(body)
    except (ValueError, msgpack.exceptions.UnpackException, msgpack.exceptions.StackError) as error:
        reason = str(error) or type(error).__name__
        raise bad_request(f"The request body is not valid msgpack: {reason}.", code="invalid_msgpack") from None
    check_parts(value, MAX_DEPTH)
    return value


def check_parts(value: Any, depth: int) -> None:
    """Raises ApiError 400 for what JSON couldn't say either, arrays and bytes apart."""
    if not depth:
        raise bad_request(f"The input is nested deeper than {MAX_DEPTH} levels.", code="invalid_msgpack")
    if isinstance(value, dict):
        if any(not isinstance(key, str) for key in value):
            raise bad_request("Keys of maps must be text.", code="invalid_msgpack")
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            check_parts(part, depth - 1)
    elif isinstance(value, msgpack.ExtType | msgpack.Timestamp):
        check_array(value)


def check_array(value: Any) -> None:
    if not isinstance(value, msgpack.ExtType) or value.code != EXT_CODE:
        message = f"Of msgpack's extension types only arrays ({EXT_CODE}) are taken; send times as text."
        raise bad_request(message, code="invalid_msgpack")
    try:
        head_of(value.data)
    except BadArray as error:
        raise bad_request(f"{error}.", code="invalid_msgpack") from None


def as_json(value: Any) -> Any:
    """How JSON would say it, without the contents of bytes and arrays, and with a number for one that isn't finite."""
    if isinstance(value, dict):
        return {name: as_json(part) for name, part in value.items()}
    if isinstance(value, msgpack.ExtType):
        return {ARRAY: None}
    if isinstance(value, list):
        return [as_json(part) for part in value]
    if isinstance(value, bytes):
        return {BYTES: ""}
    return finite(value) if isinstance(value, float) else value


def finite(number: float) -> float:
    if math.isinf(number):
        return math.copysign(INFINITE, number)
    return NOT_A_NUMBER if math.isnan(number) else number


def as_sent(message: str) -> str:
    for number, said in SAID.items():
        message = message.replace(number, said)
    return message


def with_bytes(value: Any) -> Any:
    """{"$bytes": base64} as the bytes. Raises ApiError 422."""
    if isinstance(value, list):
        return [with_bytes(part) for part in value]
    if not isinstance(value, dict):
        return value
    if value.keys() != {BYTES}:
        return {name: with_bytes(part) for name, part in value.items()}
    try:
        return base64.b64decode(value[BYTES], validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise invalid(f"'{BYTES}' must be base64 text.", BYTES) from None


def unfit(schema: dict[str, Any], value: Any, complaints: list[ValidationError]) -> ApiError:
    """The most specific complaint: the one that lies deepest."""
    complaint = max(specific(complaints), key=lambda each: len(each.instance_path))
    path = [str(part) for part in complaint.instance_path]
    if isinstance(complaint.kind, ValidationErrorKind.Required):
        path.append(str(complaint.kind.property))
    message = as_sent(complaint.message)
    if len(message) > MESSAGE_CHARACTERS:
        message = f"{message[: MESSAGE_CHARACTERS // 2]} … {message[-MESSAGE_CHARACTERS // 2 :]}"
    param = ".".join(path) or None
    where = f"Invalid value for '{param}': " if param else "Invalid input: "
    return invalid(f"{where}{message}{advice(schema, value)}.", param)


def specific(complaints: Iterable[ValidationError]) -> Iterator[ValidationError]:
    """Of an alternative that doesn't fit, what its branches say."""
    for complaint in complaints:
        branches = getattr(complaint.kind, "context", None)
        if branches:
            yield from specific(each for branch in branches for each in branch)
        else:
            yield complaint


def advice(schema: dict[str, Any], value: Any) -> str:
    """For who sends {"n": 1} to a function whose only parameter is the number n, or 1 to one that takes fields."""
    name, fields = schema.get("title"), schema.get("properties")
    if isinstance(fields, dict) and not isinstance(value, dict):
        required = schema.get("required") or ()
        names = (field if field in required else f"{field} (optional)" for field in fields)
        return f" (it takes an object with the fields {', '.join(names)})"
    if fields is not None or not isinstance(value, dict) or value.keys() != {name}:
        return ""
    return f" (the only parameter '{name}' gets the whole body: send {as_sent(json.dumps(value[name]))[:100]})"


def invalid(message: str, param: str | None) -> ApiError:
    return ApiError(422, message, code="invalid_input", param=param)
