"""Callers who go on and on while a test does something to what they call."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stoker.runtime.client.client import Client


@contextmanager
def calling(client: Client, function: str, value: object, callers: int = 1) -> Iterator[list[Any]]:
    """Their answers, as they come. A failure ends its caller and is raised at the end, beside whatever else failed."""
    stop, results, errors = threading.Event(), list[Any](), list[Exception]()

    def call() -> None:
        try:
            while not stop.is_set():
                results.append(client.invoke(function, value))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(callers)]
    for thread in threads:
        thread.start()
    try:
        yield results
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
