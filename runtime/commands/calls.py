"""`stoker invoke`."""

import json
import sys
from collections.abc import Generator, Iterable
from contextlib import closing
from itertools import chain
from typing import Annotated, Any

import typer

from stoker.runtime.commands.exits import interruptible
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


def invoke(
    function: FunctionName,
    value: Annotated[str, typer.Argument(help="Its input as JSON; '-' reads standard input.")] = "null",
    detach: Annotated[bool, typer.Option("--detach", help="Queue it as a job and print the job's id.")] = False,
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
        if detach:
            job = client.spawn(function, parsed)
            show({"id": job.id}, as_json, job.id)
        else:
            with closing(told(client, function, parsed)) as events:
                print_events(events, as_json)


def told(client: Any, function: str, value: Any) -> Generator[Any, None, None]:
    """What a call tells. A person is shown what it waits for. For a script it is one request, so that whatever ends the
    script ends the call, and so does Ctrl-C."""
    if not errors.is_terminal:
        yield from client.events(function, value)
        return
    job = client.spawn(function, value)
    try:
        with waiting(function) as say:
            watch(job, say, lambda record: record["state"] not in ("queued", "retrying"))
            events = job.events()
            first = next(event for event in events if event.name in ("", "end", "error"))
        for event in chain((first,), events):
            if event.name == "error":
                job.get()
            yield event
    except (KeyboardInterrupt, GeneratorExit):
        job.cancel()
        raise


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
