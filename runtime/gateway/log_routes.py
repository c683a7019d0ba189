"""Functions' logs: read, and followed. Of tenants they are for the owner alone: inputs of others may stand in them."""

import contextlib
import re
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal

from starlette.responses import Response
from typing_extensions import TypedDict

from stoker.queue.records import function_of
from stoker.runtime.gateway.endpoint import Endpoint, Incoming, Json
from stoker.runtime.gateway.errors import bad_request, not_found
from stoker.runtime.gateway.job_routes import STREAM_ID, job_gone, job_not_found, readable_job
from stoker.runtime.gateway.log_stream import LogStream
from stoker.runtime.gateway.standing import Birth, Standing, birth_of
from stoker.runtime.logs.line import Line
from stoker.runtime.logs.log_book import MOST_LINES, PER_READ, LogBook
from stoker.runtime.spec import owner_of

SINCE = re.compile(r"(\d{1,10}(?:\.\d{1,6})?)([smhd]?)", re.ASCII)
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
USUAL = 1_000
CHECK_S = 1.0
YES, NO = ("1", "true"), ("", "0", "false")


class LineObject(TypedDict):
    """`at` is in unix seconds. `stream` "stoker" is what the worker's host says of the replica; `job` is null for lines
    of none, or of calls that ran beside each other and can't be told apart."""

    id: str
    at: float
    replica: str
    job: str | None
    stream: Literal["stdout", "stderr", "stoker"]
    text: str


class LinePage(TypedDict):
    """The last lines that were asked for, oldest first; `has_more`: there are older ones."""

    object: Literal["list"]
    data: list[LineObject]
    has_more: bool


@dataclass(frozen=True, slots=True)
class Question:
    """Which lines of which function, in which of its lives. Of a job's the log ends with the job."""

    function: str
    born: Birth
    job: str = ""
    replica: str = ""
    since_ms: int = 0

    def wants(self, line: Line) -> bool:
        return self.job in ("", line.job) and self.replica in ("", line.replica)


async def function_logs(incoming: Incoming) -> Response:
    spec = await incoming.gateway.registry.logged(incoming.caller, incoming.path("name"))
    since, job = since_ms(incoming.query("since"), time.time()), incoming.query("job")
    if job:
        await check_job(incoming, Question(spec.name, spec.born, job))
    return await answer(incoming, Question(spec.name, spec.born, job, incoming.query("replica"), since))


async def check_job(incoming: Incoming, question: Question) -> None:
    """Raises ApiError for a job that the function doesn't know, nor its log: lines may outlive their job's record."""
    is_its_own = is_job_of(question.job, question.function)
    if is_its_own and await incoming.gateway.broker.job(question.job):
        return
    lines, _ = await LogBook(incoming.gateway.redis).last(question.function, 1, 0, question.wants)
    if not lines:
        raise job_gone(incoming, question.job) if is_its_own else job_not_found(question.job)


async def job_logs(incoming: Incoming) -> Response:
    """Of the caller's own job of its own function; of the operator any."""
    job = await readable_job(incoming)
    function = function_of(job.id)
    if owner_of(function) != incoming.caller.owner and not incoming.caller.reads_all:
        raise not_found(
            f"The log of job '{job.id}' is for the owner of its function.", code="log_not_found", param="id"
        )
    return await answer(incoming, Question(function, await birth_of(incoming, function), job.id, "", job.enqueued_ms))


async def answer(incoming: Incoming, question: Question) -> Response:
    follow = flag(incoming.query("follow"))
    limit = incoming.limit(USUAL, MOST_LINES)
    book = LogBook(incoming.gateway.redis)
    if follow:
        return LogStream(incoming.gateway, lines_of(incoming, book, question, limit))
    lines, _ = await book.last(question.function, limit + 1, question.since_ms, question.wants)
    rows = [line_object(line) for line in lines[-limit:]]
    page: LinePage = {"object": "list", "data": rows, "has_more": len(lines) > limit}
    return Json(page)


async def lines_of(
    incoming: Incoming, book: LogBook, question: Question, limit: int
) -> AsyncGenerator[LineObject | None, None]:
    """The last lines, then what comes; None: nothing new for now. Ends with the job, if it is one's log, and with the
    function. No line is given before it is known that the caller may still read it."""
    standing = Standing(incoming, question.function, question.born)
    lines, place = await first_lines(incoming, book, question, limit)
    check_at, over = 0.0, False
    while True:
        if lines or time.monotonic() >= check_at:
            if not await standing.holds():
                return
            check_at = time.monotonic() + CHECK_S
        for line in lines:
            if question.wants(line):
                yield line_object(line)
        if len(lines) < PER_READ:
            if over:
                return
            yield None
            over = bool(question.job) and await is_over(incoming, question)
        lines = await book.page(question.function, place)
        place = lines[-1].id if lines else place


async def first_lines(incoming: Incoming, book: LogBook, question: Question, limit: int) -> tuple[list[Line], str]:
    """And the place behind them. Raises ApiError 400."""
    place = incoming.headers.get("last-event-id", "")
    if not place:
        return await book.last(question.function, limit, question.since_ms, question.wants)
    if not STREAM_ID.fullmatch(place):
        raise bad_request("Last-Event-ID is not an id of this log.", param="Last-Event-ID")
    lines = await book.page(question.function, place)
    return lines, lines[-1].id if lines else place


async def is_over(incoming: Incoming, question: Question) -> bool:
    """Also of a job that the function never had."""
    if is_job_of(question.job, question.function):
        job = await incoming.gateway.broker.job(question.job)
        return job is None or job.state.terminal
    return True


def is_job_of(job_id: str, function: str) -> bool:
    with contextlib.suppress(ValueError):
        return function_of(job_id) == function
    return False


def line_object(line: Line) -> LineObject:
    return {
        "id": line.id,
        "at": line.at,
        "replica": line.replica,
        "job": line.job or None,
        "stream": line.stream,
        "text": line.text,
    }


def since_ms(text: str, now: float) -> int:
    """Unix milliseconds of `10m` (ago: s, m, h or d) or of unix seconds; "" is 0. Raises ApiError 400."""
    found = SINCE.fullmatch(text or "0")
    if found is None:
        raise bad_request("'since' is how long ago, like 30s, 10m, 2h or 1d, or unix seconds.", param="since")
    number, unit = float(found[1]), found[2]
    return int(1000 * (max(0.0, now - number * SECONDS[unit]) if unit else number))


def flag(text: str) -> bool:
    if text.lower() not in YES + NO:
        raise bad_request("'follow' is true or false.", param="follow")
    return text.lower() in YES


FOLLOW = {
    "follow": "true: server-sent events, one for each line, also for those that come, up to the function's end; "
    "`Last-Event-ID` resumes.",
    "limit": f"The last so many lines, 1 to {MOST_LINES}; {USUAL} if left out.",
}
LOG_ENDPOINTS = [
    Endpoint(
        "GET",
        "/v1/functions/{name}/logs",
        function_logs,
        "invoke",
        "What a function's workers wrote, and what happened to them.",
        "Functions",
        answer=LinePage,
        problems={
            404: "The caller has no such function of its own, or that has no such job.",
            410: "The job is no longer kept, and wrote nothing.",
        },
        reads={"Last-Event-ID": "Resume behind this line."},
        asks={
            "job": "Only lines of the job of this id; followed, up to its end.",
            "replica": "Only lines of this replica.",
            "since": "Only lines since: how long ago, like 30s, 10m, 2h or 1d, or unix seconds.",
            **FOLLOW,
        },
    ),
    Endpoint(
        "GET",
        "/v1/jobs/{id}/logs",
        job_logs,
        "invoke",
        "What a job wrote; followed, up to its end.",
        "Jobs",
        answer=LinePage,
        problems={404: "There is no such job of a function of the caller's own.", 410: "The job is no longer kept."},
        reads={"Last-Event-ID": "Resume behind this line."},
        asks=FOLLOW,
    ),
]
