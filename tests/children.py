"""Child processes of tests: none is left behind, not even by a test that fails."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

GRACE_S = 20.0


def end(process: "subprocess.Popen[Any]", grace_s: float = GRACE_S) -> None:
    """SIGTERM, and SIGKILL for what is still there after `grace_s`. Without a grace SIGKILL at once; with one, that it
    was not enough is an error."""
    try:
        if grace_s:
            process.terminate()
            process.wait(grace_s)
    finally:
        process.kill()
        process.wait()


@contextmanager
def child(command: list[Any], **options: Any) -> "Iterator[subprocess.Popen[Any]]":
    """Killed at the end, unless it has ended: Popen by itself would wait for it, however long that takes."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def descendants(pid: int, marker: str) -> list[psutil.Process]:
    """Those with `marker` in their name or command."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):
            if marker in " ".join([process.name(), *process.cmdline()]):
                found.append(process)
    return found
