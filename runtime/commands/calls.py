"""`stoker invoke`."""

import json
import sys
from typing import Annotated, Any

import typer

from stoker.runtime.commands.exits import interruptible
from stoker.runtime.commands.progress import waiting, watched
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
    """Call a function and print its result, which is JSON in any case."""
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
            typer.echo(json_text(call(client, function, parsed), ensure_ascii=False))


def call(client: Any, function: str, value: Any) -> Any:
    """A person is shown what the call waits for. For a script it is one request, so that whatever ends the script ends
    the call, and so does Ctrl-C."""
    if not errors.is_terminal:
        return client.invoke(function, value)
    job = client.spawn(function, value)
    try:
        with waiting(function) as say:
            return watched(job, say)
    except KeyboardInterrupt:
        job.cancel()
        raise
