"""One line of a batch: the same checks, job and answer as the request would have on its own."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from redis.exceptions import RedisError

from stoker.coldstart.failures import ColdStartError
from stoker.queue.records import NewJob
from stoker.runtime.batches.batch import WINDOW_S, Batch
from stoker.runtime.batches.batch_lines import (
    BadLine,
    BatchRequest,
    LineResult,
    answered,
    bad,
    not_run,
    parse_line,
    row_id,
)
from stoker.runtime.gateway.auth import EVERYONE, Caller
from stoker.runtime.gateway.batch_kinds import KINDS, Kind
from stoker.runtime.gateway.calls import enqueue
from stoker.runtime.gateway.context import Gateway
from stoker.runtime.gateway.endpoint import Incoming, no_more_body
from stoker.runtime.gateway.envelope import as_api_error
from stoker.runtime.gateway.errors import VERSION_CHANGED, ApiError
from stoker.runtime.gateway.following import Following
from stoker.runtime.gateway.letting_go import GatewayStops
from stoker.runtime.gateway.outcome import Outcome
from stoker.runtime.tenancy.api_key import OPERATOR
from stoker.runtime.tenancy.tenant import Tenant

LOWEST = 2
IN_FLIGHT = 128
BUSY = (429, 503)
LONGEST_PAUSE_S = 30.0
STOP_LOOK_S = 1.0
MOST_VERSIONS = 20
VERSION_PAUSE_S = 1.0
OUTAGES = (RedisError, OSError, TimeoutError, ColdStartError, GatewayStops)
STOPPED = {
    "batch_cancelled": "The batch was cancelled before this request was run.",
    "batch_expired": "The batch's window was over before this request was run.",
}

WhyStop = Callable[[], Awaitable[str]]


class LineRunner:
    """The tenant's limits count as they are at the moment. `why_stop` is asked now and then; from its first answer on,
    or when the tenant is gone, no further line is run. `ended` counts lines: completed, and failed."""

    def __init__(self, gateway: Gateway, batch: Batch, caller: Caller, why_stop: WhyStop) -> None:
        self._gateway = gateway
        self._batch = batch
        self._caller = caller
        self._why_stop = why_stop
        self._room = asyncio.Semaphore(IN_FLIGHT)
        self._turn = asyncio.Lock()
        self._looked_at = 0.0
        self.stopped = ""
        self.ended = (0, 0)
        self._seen: set[str] = set()

    @classmethod
    async def of(cls, gateway: Gateway, batch: Batch, why_stop: WhyStop) -> "LineRunner":
        caller = await caller_of(gateway, batch.tenant)
        runner = cls(gateway, batch, caller or Caller(Tenant(batch.tenant), ()), why_stop)
        runner.stopped = "" if caller else "batch_cancelled"
        return runner

    def skip(self, text: bytes) -> None:
        """A line that was run before: its id is taken."""
        with contextlib.suppress(BadLine):
            self._parse(text)

    def _parse(self, text: bytes) -> BatchRequest:
        """Raises BadLine."""
        most = self._gateway.settings.max_body_bytes
        if len(text) > most:
            raise BadLine("request_too_large", f"The line is longer than the limit of {most} bytes.")
        return parse_line(text, self._batch.endpoint, self._seen)

    async def result(self, number: int, text: bytes) -> LineResult:
        """Whatever is wrong with a line is in its result; an outage is raised, as one of OUTAGES."""
        async with self._room:
            result = await self._run(number, text)
        self.ended = (self.ended[0] + result.good, self.ended[1] + result.failed)
        return result

    async def _run(self, number: int, text: bytes) -> LineResult:
        try:
            request = self._parse(text)
        except BadLine as problem:
            return bad(self._batch.id, number, problem)
        try:
            return await self._answer(number, request)
        except Stopped as stopped:
            return not_run(self._batch.id, number, request.custom_id, stopped.reason, STOPPED[stopped.reason])
        except OUTAGES:
            raise
        except ApiError as error:
            return answered(self._batch.id, number, request.custom_id, error.status, "", error.body())
        except Exception as error:
            failure = as_api_error(error, row_id(self._batch.id, number))
            return answered(self._batch.id, number, request.custom_id, failure.status, "", failure.body())

    async def _answer(self, number: int, request: BatchRequest) -> LineResult:
        """Raises ApiError, or Stopped."""
        kind = KINDS[self._batch.endpoint]
        async with self._in_turn():
            parsed = kind.parse(request.body)
        job_id, outcome = await self._outcome(number, kind, parsed)
        async with self._in_turn():
            body = kind.answer(parsed, job_id, outcome.value())
            return answered(self._batch.id, number, request.custom_id, 200, job_id, body)

    async def _outcome(self, number: int, kind: Kind, parsed: Any) -> tuple[str, Outcome]:
        """The job's id and outcome; one that a deployment overtook is made again, for the new version."""
        for versions in count(1):
            job = await self._patiently(partial(self._job, number, kind, parsed))
            enqueued = await self._patiently(partial(enqueue, self._as_request(), job))
            async with Following(self._gateway, enqueued.job_id) as following:
                outcome = await self._unless_stopped(following)
            if (outcome.error or {}).get("code") != VERSION_CHANGED or versions == MOST_VERSIONS:
                return enqueued.job_id, outcome
            await asyncio.sleep(VERSION_PAUSE_S)
        raise AssertionError

    @contextlib.asynccontextmanager
    async def _in_turn(self) -> AsyncIterator[None]:
        """One line at a time, and whatever else the gateway has to do in between: many lines end in the same step."""
        async with self._turn:
            await asyncio.sleep(0)
            yield

    async def _job(self, number: int, kind: Kind, parsed: Any) -> NewJob:
        async with self._in_turn():
            job = await kind.job(self._as_request(), parsed, line_key(self._batch, number))
        kept_ms = max(job.retention_ms, 2 * WINDOW_S * 1000)
        return replace(job, priority=LOWEST, retention_ms=kept_ms)

    def _as_request(self) -> Incoming:
        return Incoming(self._gateway, self._caller, {"type": "http"}, {}, b"{}", no_more_body)

    async def _patiently(self, attempt: Callable[[], Awaitable[Any]]) -> Any:
        """A full queue, a limit or an outage is waited out."""
        pause = 0.5
        while True:
            await self._check()
            try:
                return await attempt()
            except ApiError as error:
                if error.status not in BUSY or error.code == "budget_exhausted":
                    raise
                await asyncio.sleep(min(float(error.headers.get("retry-after", pause)), LONGEST_PAUSE_S))
                pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _check(self) -> None:
        if not self.stopped and time.monotonic() - self._looked_at >= STOP_LOOK_S:
            self._looked_at = time.monotonic()
            caller = await caller_of(self._gateway, self._batch.tenant)
            self._caller = caller or self._caller
            self.stopped = await self._why_stop() if caller else "batch_cancelled"
        if self.stopped:
            raise Stopped(self.stopped)

    async def _unless_stopped(self, following: Following) -> Any:
        """The job's outcome. A job that the batch's end finds still running is cancelled."""
        outcome = asyncio.ensure_future(following.outcome())
        try:
            while not outcome.done():
                await asyncio.wait((outcome,), timeout=STOP_LOOK_S)
                if not outcome.done():
                    await self._check()
            return outcome.result()
        except Stopped:
            await self._gateway.broker.cancel(following.job_id, "the batch has ended")
            raise
        finally:
            outcome.cancel()
            await asyncio.gather(outcome, return_exceptions=True)


def line_key(batch: Batch, number: int) -> str:
    """The idempotency key of a line's job."""
    return f"{batch.id}:{number}"


async def caller_of(gateway: Gateway, tenant: str) -> Caller | None:
    """None when there is no such tenant any more."""
    if tenant == OPERATOR:
        return EVERYONE
    account = await gateway.tenants.get(tenant)
    return Caller(account, ("invoke",)) if account else None


class Stopped(Exception):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
