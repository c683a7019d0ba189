"""In the process of a function: whose code it is that runs."""

from contextvars import ContextVar

current_job: ContextVar[str] = ContextVar("stoker_job", default="")
"""The id of the job, "" in a batch and outside of such a process. Tasks have that of whoever started them."""

CALLER = "stoker-caller"
"""The header in which a call names it, so that the gateway can tell a call that waits for itself."""
