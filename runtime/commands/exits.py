"""How commands end: 0 done, 1 the job, the app or the request failed, 2 wrong usage, 3 no gateway answers, 130 stopped
by Ctrl-C."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.markup import escape

from stoker.runtime.commands.terminal import errors

DONE, FAILED, USAGE, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 130
CODES = (
    "Exit codes: 0 done; 1 the job, the app or the request failed; 2 wrong usage; 3 no gateway answers; "
    "130 stopped by Ctrl-C."
)


class Failed(Exception):
    """What was asked for didn't come about; the message says why and what to do."""


def explain(error: Exception) -> tuple[str, int]:
    """What a person should read, and the exit code."""
    from stoker.runtime.client.errors import Unreachable

    if isinstance(error, Unreachable):
        return f"{error}; start one with `stoker up`, or name it with --url or STOKER_URL", UNREACHABLE
    traceback = getattr(error, "traceback", "").rstrip()
    return "\n".join([str(error), *([traceback] if traceback else []), *advice(error)]), FAILED


def advice(error: Exception) -> list[str]:
    """What to do next, where that is known."""
    if getattr(error, "status", 0) == 401:
        return ["name a key with --api-key or STOKER_API_KEY (`stoker tenants key NAME` makes one)"]
    if getattr(error, "code", "") == "model_not_found":
        return ["`stoker functions` lists what is deployed"]
    job_id = getattr(error, "job_id", "")
    if getattr(error, "code", "") == "wait_timeout":
        return [f"(it goes on: `stoker jobs wait {job_id}` waits for it, `stoker jobs cancel {job_id}` ends it)"]
    return [f"(`stoker jobs get {job_id}` has the whole record, {words_of(job_id)})"] if job_id else []


def words_of(job_id: str) -> str:
    from stoker.queue.records import function_of
    from stoker.runtime.spec import short_name

    return f"`stoker logs {short_name(function_of(job_id))} --job {job_id}` what it wrote"


def expected_errors() -> tuple[type[Exception], ...]:
    from stoker.coldstart.failures import ColdStartError
    from stoker.queue.client import ServerUnfit
    from stoker.queue.embedded import EmbeddedServerError
    from stoker.runtime.client.errors import BadName, BadUrl, InvalidInput, StokerError
    from stoker.runtime.spec import InvalidSpec
    from stoker.runtime.supervisor import PortTaken

    return (
        Failed,
        InvalidSpec,
        InvalidInput,
        BadName,
        BadUrl,
        StokerError,
        ColdStartError,
        ServerUnfit,
        EmbeddedServerError,
        PortTaken,
        OSError,
    )


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C is how it is usually ended."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def run(command: Callable[[], Any]) -> int:
    try:
        command()
    except expected_errors() as error:
        message, code = explain(error)
        errors.print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
        return code
    return DONE
