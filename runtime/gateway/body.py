"""Reading request bodies: bounded in bytes and in time, whatever Content-Length claims."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from pydantic_core import from_json
from starlette.types import Message, Receive, Scope

from stoker.runtime.gateway.errors import ApiError, bad_request, too_large
from stoker.runtime.gateway.steps import Begun


class ClientGone(Exception):
    """The client closed the connection before the answer was complete."""


async def read_body(scope: Scope, receive: Receive, limit: int, timeout_s: float) -> bytes:
    """Raises what `body_parts` raises."""
    intake = Intake(scope, receive, limit, timeout_s)
    body = await intake.next_part()
    if not intake.more:
        return body
    return b"".join([body, *[part async for part in intake.rest()]])


async def body_parts(scope: Scope, receive: Receive, limit: int, timeout_s: float) -> AsyncIterator[bytes]:
    """Raises 413 as soon as the limit is passed, 408 when the whole body takes longer than `timeout_s`."""
    async for part in Intake(scope, receive, limit, timeout_s).rest():
        yield part


class Intake:
    """A body as it comes in; `more`: that was not the end of it."""

    def __init__(self, scope: Scope, receive: Receive, limit: int, timeout_s: float) -> None:
        if declared_length(scope) > limit:
            raise too_large(limit)
        self.more = True
        self._receive = receive
        self._limit = limit
        self._deadline = time.monotonic() + timeout_s
        self._total = 0

    async def rest(self) -> AsyncIterator[bytes]:
        while self.more:
            if part := await self.next_part():
                yield part

    async def next_part(self) -> bytes:
        message = Begun(self._receive())
        part, self.more = part_of(message.value if message.over else await in_time(message, self._deadline))
        self._total += len(part)
        if self._total > self._limit:
            raise too_large(self._limit)
        return part


def declared_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0


async def in_time(message: Begun[Message], deadline: float) -> Message:
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            return await message
    except TimeoutError:
        raise ApiError(
            408, "The request body did not arrive in time.", code="request_timeout", headers={"connection": "close"}
        ) from None


def part_of(message: Message) -> tuple[bytes, bool]:
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message.get("body", b""), message.get("more_body", False)


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
