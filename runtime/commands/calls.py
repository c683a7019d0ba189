"""`stoker invoke`."""

import json
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import chain
from typing import Annotated, Any

import typer

from stoker.runtime.commands.exits import Failed, interruptible
from stoker.runtime.commands.progress import waiting, watch
from stoker.runtime.commands.terminal import (
    GATEWAY_URL,
    ApiKey,
    AsJson,
    FunctionName,
    Url,
    client_of,
    errors,
    json_text,
    show,
)

# Of none at all the timer would not go off.
LEAST_S = 1e-3


def invoke(
    function: FunctionName,
    value: Annotated[str, typer.Argument(help="Its input as JSON; '-' reads standard input.")] = "null",
    detach: Annotated[bool, typer.Option("--detach", help="Queue it as a job and print the job's id.")] = False,
    key: Annotated[
        str, typer.Option(help="A name of your own for its job, which runs once however often you call it; goes on.")
    ] = "",
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Seconds to wait for its end at most; then its job goes on.")
    ] = None,
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Call a function and print its result as JSON: of a generator a line for each value, as it comes. A model's text
    is printed as it is written, with --json in pieces, a line for each, and its whole answer behind them."""
    text = sys.stdin.read() if value == "-" else value
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"the input is not JSON ({error}); quote text like '\"hello\"'") from error
    with interruptible(), client_of(url, api_key) as client:
        if not detach and not key and timeout is None and not errors.is_terminal:
            # One request: whatever ends a script ends its call.
            with closing(client.events(function, parsed)) as events:
                print_events(events, as_json)
            return
        job = spawned(client, function, parsed, key)
        if detach:
            show({"id": job.id}, as_json, job.id)
        else:
            print_job_events(job, timeout, as_json, stays=bool(key))


def spawned(client: Any, function: str, value: Any, key: str) -> Any:
    """Raises BadParameter for what is no key."""
    from stoker.runtime.client.messages import checked_key

    try:
        return client.spawn(function, value, key=key and checked_key(key))
    except ValueError as error:
        raise typer.BadParameter(f"{error}") from error


def print_job_events(job: Any, timeout: float | None, as_json: bool, *, stays: bool) -> None:
    """Unless it `stays`, the job ends with who waits for it, by Ctrl-C say. Raises JobFailed, and WaitTimeout."""
    try:
        with time_limit(timeout):
            print_events(told(job), as_json)
    except TimeIsUp:
        raise too_late(job, timeout or 0.0) from None
    except (KeyboardInterrupt, OSError):
        if not stays:
            job.cancel()
        raise


def too_late(job: Any, waited_s: float) -> Exception:
    """Raises JobFailed for a job that failed just then."""
    from stoker.runtime.client.errors import WaitTimeout

    record = job.status()
    if record["finished_at"] is None:
        return WaitTimeout(record, waited_s)
    job.get()
    return Failed(f"job {job.id} ended just when its time was up: `stoker jobs get {job.id}` has its result")


def told(job: Any) -> Iterator[Any]:
    """What a job tells, and to a person first what it waits for."""
    with waiting(job.id) as say:
        watch(job, say, lambda record: record["state"] not in ("queued", "retrying"))
        events = job.events()
        first = next(event for event in events if event.name in ("", "end", "error"))
    for event in chain((first,), events):
        if event.name == "error":
            job.get()
        yield event


class TimeIsUp(BaseException):
    """It passes whatever handles errors on the way."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raises TimeIsUp in the midst of what runs too long."""

    def end(*_: object) -> None:
        raise TimeIsUp

    if seconds is None:
        yield
        return
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, LEAST_S))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def print_events(events: Iterable[Any], as_json: bool) -> None:
    begun = pieces = False
    for event in events:
        if not event.name:
            begun, pieces = True, is_piece(event.data)
            print_part(event.data, pieces and not as_json)
        elif event.name == "retry" and begun:
            errors.print(f"\nits worker was lost: attempt {event.data['attempt']} begins again with the first")
        elif event.name == "end" and begun and pieces and not as_json:
            typer.echo()
        elif event.name == "end" and (pieces or not begun):
            print_part(event.data["result"], False)


def is_piece(part: Any) -> bool:
    """Of a language model's answer."""
    return isinstance(part, dict) and part.keys() == {"text", "ids"}


def print_part(part: Any, as_text: bool) -> None:
    typer.echo(part["text"] if as_text else json_text(part, ensure_ascii=False), nl=not as_text)
