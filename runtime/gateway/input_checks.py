"""Checks of calls' inputs that hold nobody up: those whose work is known to be little are done at once, all others in a
process of the calling tenant's, with a time limit."""

import json
from dataclasses import dataclass, field
from typing import Any

from jsonschema_rs import Draft202012Validator

from stoker.queue.records import pack
from stoker.runtime.gateway.errors import ApiError
from stoker.runtime.gateway.input_check import ENDLESS, Complaint, compiled, complaint_about, parts_in, weight_of
from stoker.runtime.gateway.input_process import CheckEnded, InputProcess
from stoker.runtime.gateway.lanes import Lanes
from stoker.runtime.inputs import MAX_SCHEMA
from stoker.runtime.spec import FunctionSpec, InvalidSpec

MOST_KNOWN = 10_000
MOST_PROCESSES = 256
# Of work that is done at once: at most about 10 ms, and 40 ms for what is wrong.
MOST_WORK, MOST_WRONG_WORK = 200_000, 2_000
THREADS, THREADS_PER_TENANT = 8, 1


@dataclass
class Known:
    """A function's schema, compiled once it is needed here."""

    schema: dict[str, Any]
    weight: int = field(init=False)
    _validator: Draft202012Validator | None = None

    def __post_init__(self) -> None:
        self.weight = weight_of(self.schema)

    def validator(self) -> Draft202012Validator:
        if self._validator is None:
            self._validator = compiled(self.schema)
        return self._validator


class InputChecks:
    def __init__(self) -> None:
        self._known: dict[str, Known] = {}
        self._lanes = Lanes(THREADS, THREADS_PER_TENANT, "inputs")
        self._processes: dict[str, InputProcess] = {}

    def close(self) -> None:
        self._lanes.close()

    async def check(self, tenant: str, spec: FunctionSpec, value: Any, body: bytes) -> None:
        """Raises ApiError 422 that names what doesn't fit. `value` is what `body` says, as JSON has it."""
        if spec.input_schema is None:
            return
        known = self._known_of(spec.name, spec.input_schema)
        complaint = await self._complaint(tenant, known, value, body)
        if complaint:
            raise invalid(*complaint)

    async def check_schema(self, tenant: str, schema: dict[str, Any] | None) -> None:
        """Of a function that is deployed. Raises InvalidSpec."""
        if schema is None:
            return
        try:
            text = json.dumps(schema)
            pack(schema)
        except (OverflowError, RecursionError, ValueError) as error:
            raise InvalidSpec(f"input_schema can't be stored: {error}") from None
        if len(text) > MAX_SCHEMA:
            raise InvalidSpec(f"input_schema has more than {MAX_SCHEMA >> 10} KiB")
        if weight_of(schema) < ENDLESS:
            compiled(schema)
            return
        try:
            await self._apart(tenant, schema, b"")
        except CheckEnded as ended:
            raise InvalidSpec(f"input_schema can't be used: reading it {ended}") from None

    async def _complaint(self, tenant: str, known: Known, value: Any, body: bytes) -> Complaint | None:
        work = known.weight * parts_in(body)
        if known.weight < ENDLESS and work <= MOST_WORK:
            if known.validator().is_valid(value):
                return None
            if work <= MOST_WRONG_WORK:
                return complaint_about(known.schema, known.validator(), value, work)
        try:
            return await self._apart(tenant, known.schema, body)
        except CheckEnded as ended:
            raise check_failed(str(ended)) from None

    async def _apart(self, tenant: str, schema: dict[str, Any], body: bytes) -> Complaint | None:
        if tenant not in self._processes:
            if len(self._processes) >= MOST_PROCESSES:
                self._processes.pop(next(iter(self._processes)))
            self._processes[tenant] = InputProcess()
        return await self._lanes.run(tenant, self._processes[tenant].complaint, schema, body)

    def _known_of(self, name: str, schema: dict[str, Any]) -> Known:
        known = self._known.get(name)
        if known is None or known.schema != schema:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            known = self._known[name] = Known(schema)
        return known


def invalid(message: str, param: str | None) -> ApiError:
    return ApiError(422, message, code="invalid_input", param=param)


def check_failed(why: str) -> ApiError:
    """No fault of the gateway's, which would make clients try again."""
    message = f"The input can't be checked against the function's schema: doing so {why}. Send a smaller input, or"
    return ApiError(422, f"{message} deploy the function with a simpler schema.", code="input_check_too_long")
