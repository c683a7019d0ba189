"""In the process of a function: whose code it is that runs."""

from collections.abc import Callable
from contextvars import ContextVar

current_job: ContextVar[str] = ContextVar("stoker_job", default="")
"""The id of the job, "" in a batch, in threads that code started, and outside of such a process. Tasks have that of
whoever started them."""


class Process:
    """`only_call` gives a job of the only call that runs in it, "" while none or several do."""

    def __init__(self) -> None:
        self.only_call: Callable[[], str] = str


this_process = Process()


def calling_job() -> str:
    """The id of the job whose code this is, as far as can be told; of a batch, one of its jobs."""
    return current_job.get() or this_process.only_call()


CALLER = "stoker-caller"
"""The header in which a call names it, so that the gateway can tell a call that waits for itself."""
