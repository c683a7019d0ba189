"""Reading request bodies: bounded in bytes and in time, whatever Content-Length claims."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from pydantic_core import from_json
from starlette.types import Receive, Scope

from stoker.runtime.gateway.errors import ApiError, bad_request, too_large

DRAIN_FACTOR = 3
DRAIN_S = 2.0


class ClientGone(Exception):
    """The client closed the connection before the answer was complete."""


async def read_body(scope: Scope, receive: Receive, limit: int, timeout_s: float) -> bytes:
    parts = [part async for part in body_parts(scope, receive, limit, timeout_s)]
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def body_parts(scope: Scope, receive: Receive, limit: int, timeout_s: float) -> AsyncIterator[bytes]:
    """Raises 413 as soon as the limit is passed, 408 when the whole body takes longer than `timeout_s`."""
    total = declared_length(scope)
    if total > limit:
        await discard(receive, limit * DRAIN_FACTOR)
        raise too_large(limit)
    deadline = asyncio.get_running_loop().time() + timeout_s
    total, more = 0, True
    while more:
        part, more = await next_part(receive, deadline)
        total += len(part)
        if total > limit:
            await discard(receive, limit * DRAIN_FACTOR)
            raise too_large(limit)
        if part:
            yield part


def declared_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0


async def next_part(receive: Receive, deadline: float) -> tuple[bytes, bool]:
    try:
        async with asyncio.timeout_at(deadline):
            message = await receive()
    except TimeoutError:
        raise ApiError(
            408, "The request body did not arrive in time.", code="request_timeout", headers={"connection": "close"}
        ) from None
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message.get("body", b""), message.get("more_body", False)


async def discard(receive: Receive, limit: int) -> None:
    """Reads on for a moment: a client that is still writing would see a reset connection instead of the 413."""
    total, more = 0, True
    deadline = asyncio.get_running_loop().time() + DRAIN_S
    while more and total < limit:
        try:
            part, more = await next_part(receive, deadline)
        except (ApiError, ClientGone):
            return
        total += len(part)


def parse_json(body: bytes) -> Any:
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"The request body is not valid JSON: {error}.", code="invalid_json") from None


def parse_object(body: bytes) -> dict[str, Any]:
    value = parse_json(body)
    if not isinstance(value, dict):
        raise bad_request("The request body must be a JSON object.")
    return value
