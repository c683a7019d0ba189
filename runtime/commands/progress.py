"""What is going on, on standard error and only for a person: nothing where that is no terminal, unless it says so."""

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from stoker.runtime.commands.terminal import errors

LOOK_S = 0.25
NUMBER = re.compile(r"\d+(\.\d+)?")

Say = Callable[[str], None]
Moved = Callable[[int, int], None]


@contextlib.contextmanager
def waiting(first: str, *, plainly: bool = False) -> Iterator[Say]:
    """A line that is drawn over with each new text; where it can't be, `plainly` asks for a line whenever more than
    the text's numbers change."""
    if not errors.is_terminal:
        yield changes() if plainly else lambda text: None
        return
    with errors.status(escape(first)) as status:
        yield lambda text: status.update(escape(text))


def changes() -> Say:
    last = ""

    def say(text: str) -> None:
        nonlocal last
        if last != (last := NUMBER.sub("", text)):
            errors.print(escape(text), highlight=False, soft_wrap=True)

    return say


@contextlib.contextmanager
def moving(what: str) -> Iterator[Moved]:
    """A bar; it is told the bytes that are done and those in all."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=errors, disable=not errors.is_terminal, transient=True) as progress:
        task = progress.add_task(escape(what), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def watched(job: Any, say: Say) -> Any:
    """The result of a job, while `say` is told what it waits for. Raises JobFailed."""
    watch(job, say, lambda record: record["finished_at"] is not None)
    return job.get()


def watch(job: Any, say: Say, until: Callable[[dict[str, Any]], bool]) -> None:
    """Tells a person what a job waits for, until its record is as it should be."""
    while errors.is_terminal:
        record = job.status()
        say(f"{record['function']}: {record['wait_reason'] or record['state']}")
        if until(record):
            return
        time.sleep(LOOK_S)
