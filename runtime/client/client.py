"""Calls deployed functions and reads their jobs over HTTP."""

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

import httpx
from anyio.from_thread import start_blocking_portal
from rich.progress import track

from stoker.runtime.client.async_client import AsyncClient
from stoker.runtime.client.errors import StokerError, WaitTimeout, in_words_of_key
from stoker.runtime.client.job import Job
from stoker.runtime.client.mapping import CONCURRENCY, Mapping
from stoker.runtime.client.messages import (
    EVENT_STREAM,
    WAIT_S,
    body_of,
    checked_jobs,
    connection,
    decoded,
    failure_of,
    has_ended,
    job_body,
    new_id,
    own_job,
    raise_for_error,
    waiting,
)
from stoker.runtime.client.paths import function_path, job_path
from stoker.runtime.client.patience import Patience
from stoker.runtime.client.reach import Reach
from stoker.runtime.client.server_events import EventParser, ServerEvent, parts_of
from stoker.runtime.client.time_limit import TimeLimit

T = TypeVar("T")


class Client(Reach):
    """Talks to a gateway over HTTP. `url` and `api_key` default to STOKER_URL and STOKER_API_KEY.

    A gateway that asks to come back later (429, 503) is obeyed. When the connection to one that had answered before is
    lost, what may be repeated is sent again for half a minute: jobs, and an `invoke` with a key.
    """

    def __init__(self, url: str = "", api_key: str = "", timeout: float = 600.0) -> None:
        self._settings = (url, api_key, timeout)
        self._http = httpx.Client(**connection(url, api_key, timeout))
        self.url = str(self._http.base_url).rstrip("/")

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def request(self, method: str, path: str, **options: Any) -> Any:
        """The decoded body. Raises StokerError for an error answer, and Unreachable when there is none."""
        return decoded(self._answer(method, path, **options))

    def insist(self, method: str, path: str, **options: Any) -> Any:
        """The same, of a request that may be repeated."""
        return insist(lambda: self.request(method, path, **options))

    def invoke(self, function: str, value: Any = None, *, key: str = "", timeout: float | None = None) -> Any:
        """Runs `function` and waits for its result. Raises JobFailed, and after `timeout` seconds WaitTimeout (a
        TimeoutError) with the id of its job, which goes on. Under a `key` it runs once however often it is invoked, and
        the call is repeated when the connection is lost (`spawn` has keys of its own)."""
        path, options, limit = function_path(function), body_of(value, key), TimeLimit(timeout)
        try:
            answer = insist(
                lambda: self._answer("POST", path, **limit.asked(options)), even_if_lost=bool(key), until=limit.until
            )
        except StokerError as error:
            raise in_words_of_key(self._failure(error), key, "a different input") from None
        return limit.returned(answer)

    def spawn(self, function: str, value: Any = None, *, key: str = "", webhook: str = "") -> Job:
        """Queues a job and returns at once. Under a `key` of one's own (letters, digits, `.`, `_`, `~` and `-`) it is
        queued once, however often and from wherever this is called. Its end is told to the URL `webhook`."""
        try:
            record = self.insist("PUT", own_job(function, key or new_id()), **job_body(value, webhook))
        except StokerError as error:
            raise in_words_of_key(error, key, "a different input") from None
        return Job(self, record["id"])

    def attach(self, job_id: str) -> Job:
        """The handle of a job that was queued before."""
        return Job(self, job_id)

    def gather(self, *jobs: Job, return_exceptions: bool = False) -> list[Any]:
        """The results of all jobs, in their order. Of those that failed, the first one's JobFailed is raised, or each
        stands in its place."""
        checked_jobs(jobs, Job)
        return [collected(job.get, return_exceptions) for job in jobs]

    def map(
        self,
        function: str,
        inputs: Iterable[Any],
        *,
        concurrency: int = CONCURRENCY,
        return_exceptions: bool = False,
        order_outputs: bool = True,
        key: str = "",
        progress: bool = False,
    ) -> Iterator[Any]:
        """The results of `function` for each input, as they come: however many there are, a few times `concurrency`
        are held at once. See AsyncClient.map."""
        client = AsyncClient(*self._settings)
        run = client._mapping(function, concurrency, return_exceptions, order_outputs, key)
        results = mapped(run, inputs, client)
        total = len(inputs) if hasattr(inputs, "__len__") else None  # type: ignore[arg-type]
        return iter(track(results, function, total=total)) if progress else results

    def stream(self, function: str, value: Any = None) -> Iterator[Any]:
        """The parts that a generator yields, as they come; of a function that is no generator its one value. When its
        worker is lost, they begin again with the first. Raises JobFailed."""
        begun = False
        for event in self.events(function, value):
            for part in parts_of(event, begun):
                begun = True
                yield part

    def events(self, function: str, value: Any = None) -> Iterator[ServerEvent]:
        """Everything that a call tells, up to its end. Raises JobFailed."""
        options = body_of(value)
        options["headers"] |= EVENT_STREAM
        try:
            for event in self._begun("POST", function_path(function), **options):
                if event.name == "error":
                    raise StokerError(500, event.data["error"], event.job_id)
                yield event
        except StokerError as error:
            raise self._failure(error) from None

    def job(self, job_id: str) -> dict[str, Any]:
        return self.request("GET", job_path(job_id))

    def wait(self, job_id: str, timeout: float | None = None) -> dict[str, Any]:
        """The job's record once it has ended, however it did. Raises WaitTimeout (a TimeoutError) after `timeout`
        seconds."""
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        while True:
            wait_s = min(WAIT_S, max(0.0, deadline - time.monotonic()))
            record = self.insist("GET", job_path(job_id), **waiting(wait_s))
            if has_ended(record):
                return record
            if time.monotonic() >= deadline:
                raise WaitTimeout(record, timeout or 0.0)

    def cancel(self, job_id: str) -> dict[str, Any]:
        return self.insist("DELETE", job_path(job_id))

    def dead(self, function: str, *, limit: int = 20, after: str = "") -> dict[str, Any]:
        """A page of the function's jobs whose attempts are used up, the newest first."""
        return self.request("GET", f"{function_path(function)}/dead", params={"limit": limit, "after": after})

    def replay(self, job_id: str) -> dict[str, Any]:
        """Queues a dead or failed job again and returns its record."""
        return self.request("POST", f"{job_path(job_id)}/replay")

    def delete(self, function: str) -> dict[str, Any]:
        """What went with it: `cancelled_jobs` were queued or ran."""
        return self.request("DELETE", function_path(function))

    def functions(self) -> list[dict[str, Any]]:
        return self.request("GET", "/v1/functions")["data"]

    def hosts(self) -> dict[str, Any]:
        """Pools and hosts, and what functions wait for."""
        return self.request("GET", "/v1/hosts")

    def stream_events(self, method: str, path: str, **options: Any) -> Generator[ServerEvent, None, None]:
        """The events of a streamed answer."""
        with self._reaching(), self._http.stream(method, path, **options) as response:
            self._reached = True
            if response.is_error:
                response.read()
            raise_for_error(response)
            parser = EventParser(response.headers.get("x-job-id", ""))
            for text in response.iter_text():
                yield from parser.feed(text)

    def _begun(self, method: str, path: str, **options: Any) -> Iterator[ServerEvent]:
        """The same; a request that is asked to come back later does so."""

        def begin() -> tuple[ServerEvent | None, Generator[ServerEvent, None, None]]:
            events = self.stream_events(method, path, **options)
            return next(events, None), events

        first, rest = insist(begin, even_if_lost=False)
        with contextlib.closing(rest):
            if first:
                yield first
            yield from rest

    def _answer(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Raises StokerError."""
        with self._reaching():
            response = self._http.request(method, path, **options)
        self._reached = True
        raise_for_error(response)
        return response

    def _failure(self, told: StokerError) -> StokerError:
        """With all that is known of its job, where there was one."""
        if told.job_id:
            with contextlib.suppress(StokerError):
                return failure_of(self.job(told.job_id), told)
        return told


def insist(send: Callable[[], T], *, even_if_lost: bool = True, until: float = math.inf) -> T:
    patience = Patience()
    while True:
        try:
            return send()
        except StokerError as error:
            if not even_if_lost and error.retry_after_s is None:
                raise
            time.sleep(patience.pause(error, time.monotonic(), until))


def collected(get: Callable[[], Any], return_exceptions: bool) -> Any:
    try:
        return get()
    except StokerError as error:
        if not return_exceptions:
            raise
        return error


def mapped(run: Mapping, inputs: Iterable[Any], client: AsyncClient) -> Iterator[Any]:
    """The caller's thread takes the inputs; an event loop in another one sends them."""
    with start_blocking_portal() as portal:
        try:
            for value in inputs:
                while run.full:
                    yield from portal.call(run.ended)
                yield from portal.call(run.add, value)
            while run.busy:
                yield from portal.call(run.ended)
        finally:
            portal.call(run.close)
            portal.call(client.close)
