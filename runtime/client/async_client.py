"""The client for programs that run an event loop."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Sized
from typing import Any, TypeVar

import httpx
from rich.progress import Progress

from stoker.runtime.client.async_job import AsyncJob
from stoker.runtime.client.errors import StokerError, WaitTimeout, in_words_of_key
from stoker.runtime.client.lanes import lanes
from stoker.runtime.client.mapping import CONCURRENCY, Mapping
from stoker.runtime.client.messages import (
    EVENT_STREAM,
    MAP_KEY_MOST,
    WAIT_S,
    body_of,
    checked_jobs,
    checked_key,
    connection,
    decoded,
    failure_of,
    has_ended,
    is_left_over,
    job_body,
    new_id,
    own_job,
    raise_for_error,
    result_of,
    waiting,
)
from stoker.runtime.client.paths import function_path, job_path
from stoker.runtime.client.patience import Patience
from stoker.runtime.client.reach import Reach
from stoker.runtime.client.server_events import EventParser, ServerEvent, parts_of
from stoker.runtime.client.time_limit import TimeLimit

T = TypeVar("T")

GIVE_UP_S = 5.0


class AsyncClient(Reach):
    """What Client is, with methods to be awaited."""

    def __init__(self, url: str = "", api_key: str = "", timeout: float = 600.0) -> None:
        self._http = httpx.AsyncClient(**connection(url, api_key, timeout), transport=lanes())
        self.url = str(self._http.base_url).rstrip("/")

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def request(self, method: str, path: str, **options: Any) -> Any:
        """The decoded body. Raises StokerError for an error answer, and Unreachable when there is none."""
        return decoded(await self._answer(method, path, **options))

    async def insist(self, method: str, path: str, **options: Any) -> Any:
        """The same, of a request that may be repeated."""
        return await insist(lambda: self.request(method, path, **options))

    async def invoke(self, function: str, value: Any = None, *, key: str = "", timeout: float | None = None) -> Any:
        """Runs `function` and waits for its result. Raises JobFailed, and after `timeout` seconds WaitTimeout (a
        TimeoutError) with the id of its job, which goes on. Under a `key` it runs once however often it is invoked, and
        the call is repeated when the connection is lost (`spawn` has keys of its own)."""
        path, options, limit = function_path(function), body_of(value, key), TimeLimit(timeout)
        try:
            answer = await insist(
                lambda: self._answer("POST", path, **limit.asked(options)), even_if_lost=bool(key), until=limit.until
            )
        except StokerError as error:
            raise in_words_of_key(await self._failure(error), key, "a different input") from None
        return limit.returned(answer)

    async def spawn(self, function: str, value: Any = None, *, key: str = "", webhook: str = "") -> AsyncJob:
        """Queues a job and returns at once. Under a `key` of one's own (letters, digits, `.`, `_`, `~` and `-`) it is
        queued once, however often and from wherever this is called. Its end is told to the URL `webhook`."""
        try:
            record = await self.insist("PUT", own_job(function, key or new_id()), **job_body(value, webhook))
        except StokerError as error:
            raise in_words_of_key(error, key, "a different input") from None
        return AsyncJob(self, record["id"])

    def attach(self, job_id: str) -> AsyncJob:
        """The handle of a job that was queued before."""
        return AsyncJob(self, job_id)

    async def gather(self, *jobs: AsyncJob, return_exceptions: bool = False) -> list[Any]:
        """The results of all jobs, in their order. Of those that failed, the first one's JobFailed is raised, or each
        stands in its place."""
        checked_jobs(jobs, AsyncJob)
        return [await collected(job.get, return_exceptions) for job in jobs]

    async def map(
        self,
        function: str,
        inputs: Iterable[Any] | AsyncIterable[Any],
        *,
        concurrency: int = CONCURRENCY,
        return_exceptions: bool = False,
        order_outputs: bool = True,
        key: str = "",
        progress: bool = False,
    ) -> AsyncIterator[Any]:
        """The results of `function` for each input, as they come, in the inputs' order or as they end: take them with
        `async for result in client.map(...)`, without `await`.

        Each input is a job of its own, queued once and waited for by the request that queues it, `concurrency` of them
        at a time. Inputs are taken only as there is room, so there may be any number of them. The first input that
        fails raises its JobFailed, or with `return_exceptions` each stands in its place. Leaving early cancels what is
        under way; but under a `key` (100 letters, digits, `.`, `_`, `~` and `-` at most) it goes on, and a later map of
        the same inputs under the same key, after a crash perhaps, finds results that are there (for as long as the
        function keeps them) and runs none of those twice. An input whose job of an earlier map failed, or was lost with
        its workers, is given one more life in each later one; one that was cancelled or whose time ran out stays so.
        `progress` draws a bar.
        """
        run = self._mapping(function, concurrency, return_exceptions, order_outputs, key)
        with Progress(disable=not progress) as bar:
            task = bar.add_task(function, total=len(inputs) if isinstance(inputs, Sized) else None)
            async with contextlib.aclosing(mapped(run, inputs)) as results:
                async for result in results:
                    bar.advance(task)
                    yield result

    def _mapping(
        self, function: str, concurrency: int, return_exceptions: bool, order_outputs: bool, key: str
    ) -> Mapping:
        name, run_id = checked_key(key, MAP_KEY_MOST) if key else new_id(), new_id()

        async def run(place: int, value: Any) -> Any:
            try:
                return result_of(await self._finished(function, f"{name}.{place}", value, run_id))
            except StokerError as error:
                raise in_words_of_key(error, name, f"a different input {place} (the first is 0)") from None

        async def give_up(places: list[int]) -> None:
            if not key:
                await self._cancel(own_job(function, f"{name}.{place}") for place in places)

        return Mapping(run, give_up, concurrency, return_exceptions, order_outputs)

    async def stream(self, function: str, value: Any = None) -> AsyncIterator[Any]:
        """The parts that a generator yields, as they come (`async for part in client.stream(...)`, without `await`); of
        a function that is no generator its one value. When its worker is lost, they begin again with the first. Raises
        JobFailed."""
        begun = False
        async with contextlib.aclosing(self.events(function, value)) as events:
            async for event in events:
                for part in parts_of(event, begun):
                    begun = True
                    yield part

    async def events(self, function: str, value: Any = None) -> AsyncGenerator[ServerEvent, None]:
        """Everything that a call tells, up to its end. Raises JobFailed."""
        options = body_of(value)
        options["headers"] |= EVENT_STREAM
        try:
            async with contextlib.aclosing(self._begun("POST", function_path(function), **options)) as events:
                async for event in events:
                    if event.name == "error":
                        raise StokerError(500, event.data["error"], event.job_id)
                    yield event
        except StokerError as error:
            raise await self._failure(error) from None

    async def job(self, job_id: str) -> dict[str, Any]:
        return await self.request("GET", job_path(job_id))

    async def wait(self, job_id: str, timeout: float | None = None) -> dict[str, Any]:
        """The job's record once it has ended, however it did. Raises WaitTimeout (a TimeoutError) after `timeout`
        seconds."""
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        while True:
            wait_s = min(WAIT_S, max(0.0, deadline - time.monotonic()))
            record = await self.insist("GET", job_path(job_id), **waiting(wait_s))
            if has_ended(record):
                return record
            if time.monotonic() >= deadline:
                raise WaitTimeout(record, timeout or 0.0)

    async def cancel(self, job_id: str) -> dict[str, Any]:
        return await self.insist("DELETE", job_path(job_id))

    async def dead(self, function: str, *, limit: int = 20, after: str = "") -> dict[str, Any]:
        """A page of the function's jobs whose attempts are used up, the newest first."""
        return await self.request("GET", f"{function_path(function)}/dead", params={"limit": limit, "after": after})

    async def replay(self, job_id: str) -> dict[str, Any]:
        """Queues a dead or failed job again and returns its record."""
        return await self.request("POST", f"{job_path(job_id)}/replay")

    async def delete(self, function: str) -> dict[str, Any]:
        """What went with it: `cancelled_jobs` were queued or ran."""
        return await self.request("DELETE", function_path(function))

    async def functions(self) -> list[dict[str, Any]]:
        return (await self.request("GET", "/v1/functions"))["data"]

    async def hosts(self) -> dict[str, Any]:
        """Pools and hosts, and what functions wait for."""
        return await self.request("GET", "/v1/hosts")

    async def stream_events(self, method: str, path: str, **options: Any) -> AsyncGenerator[ServerEvent, None]:
        """The events of a streamed answer."""
        with self._reaching():
            async with self._http.stream(method, path, **options) as response:
                self._reached = True
                if response.is_error:
                    await response.aread()
                raise_for_error(response)
                parser = EventParser(response.headers.get("x-job-id", ""))
                async for text in response.aiter_text():
                    for event in parser.feed(text):
                        yield event

    async def _begun(self, method: str, path: str, **options: Any) -> AsyncGenerator[ServerEvent, None]:
        """The same; a request that is asked to come back later does so."""

        async def begin() -> tuple[ServerEvent | None, AsyncGenerator[ServerEvent, None]]:
            events = self.stream_events(method, path, **options)
            return await anext(events, None), events

        first, rest = await insist(begin, even_if_lost=False)
        async with contextlib.aclosing(rest):
            if first:
                yield first
            async for event in rest:
                yield event

    async def _finished(self, function: str, own_id: str, value: Any, run_id: str) -> dict[str, Any]:
        """The record of a job that is queued, if it isn't yet, and has ended. One that an earlier run left without a
        result is replayed once by this run."""
        path, options = own_job(function, own_id), waiting(WAIT_S, **body_of(value))
        answer = await insist(lambda: self._answer("PUT", path, **options))
        record = await self._end_of(decoded(answer))
        return await self._again(record["id"], run_id) if is_left_over(answer, record) else record

    async def _end_of(self, record: dict[str, Any]) -> dict[str, Any]:
        return record if has_ended(record) else await self.wait(record["id"])

    async def _again(self, job_id: str, run_id: str) -> dict[str, Any]:
        """Another run may have been quicker, or the function may be gone: then the job is as it is."""
        with contextlib.suppress(StokerError):
            await self.insist("POST", f"{job_path(job_id)}/replay", headers={"idempotency-key": run_id})
        return await self.wait(job_id)

    async def _answer(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Raises StokerError."""
        with self._reaching():
            response = await self._http.request(method, path, **options)
        self._reached = True
        raise_for_error(response)
        return response

    async def _cancel(self, paths: Iterable[str]) -> None:
        """As far as it can be done in a moment."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GIVE_UP_S):
                await asyncio.gather(*(self.request("DELETE", path) for path in paths), return_exceptions=True)

    async def _failure(self, told: StokerError) -> StokerError:
        """With all that is known of its job, where there was one."""
        if told.job_id:
            with contextlib.suppress(StokerError):
                return failure_of(await self.job(told.job_id), told)
        return told


async def insist(send: Callable[[], Awaitable[T]], *, even_if_lost: bool = True, until: float = math.inf) -> T:
    patience = Patience()
    while True:
        try:
            return await send()
        except StokerError as error:
            if not even_if_lost and error.retry_after_s is None:
                raise
            await asyncio.sleep(patience.pause(error, time.monotonic(), until))


async def collected(get: Callable[[], Awaitable[Any]], return_exceptions: bool) -> Any:
    try:
        return await get()
    except StokerError as error:
        if not return_exceptions:
            raise
        return error


async def each(inputs: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(inputs, AsyncIterable):
        async for value in inputs:
            yield value
    else:
        for value in inputs:
            yield value


async def mapped(run: Mapping, inputs: Iterable[Any] | AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
    try:
        async for value in each(inputs):
            while run.full:
                for result in await run.ended():
                    yield result
            for result in await run.add(value):
                yield result
        while run.busy:
            for result in await run.ended():
                yield result
    finally:
        await run.close()
