"""The input of a function's call: read from JSON or msgpack, and checked against what the function's annotations say,
before anything wakes."""

import base64
import binascii
import json
from typing import Any

import msgpack

from stoker.runtime.arrays import EXT_CODE, BadArray, head_of
from stoker.runtime.client.media import BYTES
from stoker.runtime.gateway.endpoint import Incoming
from stoker.runtime.gateway.errors import bad_request
from stoker.runtime.gateway.input_check import as_json
from stoker.runtime.gateway.input_checks import InputChecks, invalid
from stoker.runtime.gateway.media import is_msgpack
from stoker.runtime.spec import FunctionSpec

MAX_DEPTH = 100
BYTES_MARK = f'"{BYTES}"'.encode()


async def call_input(incoming: Incoming, checks: InputChecks, spec: FunctionSpec) -> Any:
    """What the worker gets. Raises ApiError 400 for a body that can't be read, 422 for one that doesn't fit."""
    tenant = incoming.caller.tenant
    if is_msgpack(incoming.headers):
        value = from_msgpack(incoming.body)
        if spec.input_schema is not None:
            plain = as_json(value)
            await checks.check(tenant, spec, plain, json.dumps(plain).encode())
        return value
    value = incoming.json()
    await checks.check(tenant, spec, value, incoming.body or b"null")
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
