"""Errors of user code as records for the function's owner. Whatever was thrown, and whatever it does when it is looked
at: there is always a record, and one that can be sent and is of no great size."""

import traceback
from pathlib import Path
from typing import Any

from stoker.runtime.error_record import bounded, cut
from stoker.runtime.inputs import Misfit

RUNTIME = Path(__file__).parents[1]

Record = dict[str, Any]


class Allowance:
    """What this process may allocate, in MB; 0: there is no limit."""

    memory_mb = 0


def user_error(error: BaseException) -> Record:
    """What the function's owner sees: the traceback begins in their code."""
    try:
        return described(error)
    except BaseException as second:
        return bare(type(error), f"it can't be described: {name_of(type(second))}")


def described(error: BaseException) -> Record:
    name = name_of(type(error))
    said = ": ".join(filter(None, (name, text_of(error))))
    record = {
        "type": "function_error",
        "message": said + carried(hint(error)),
        "code": name,
        # A long message leaves room for the lines that lead to it.
        "traceback": carried("".join([*own_frames(error), cut("message", said), "\n"])),
    }
    return bounded(record)


def bare(kind: type[BaseException], message: str) -> Record:
    name = name_of(kind)
    return bounded({"type": "function_error", "message": f"{name}: {message}", "code": name, "traceback": ""})


def name_of(kind: type[BaseException]) -> str:
    """Not what a metaclass makes of it."""
    return type.__dict__["__name__"].__get__(kind)


def own_frames(error: BaseException) -> list[str]:
    """Of the traceback, the lines in user code."""
    try:
        frames = traceback.extract_tb(error.__traceback__)
        return traceback.format_list([frame for frame in frames if not Path(frame.filename).is_relative_to(RUNTIME)])
    except BaseException as second:
        return [f"  (the traceback can't be read: {name_of(type(second))})\n"]


def input_error(error: Misfit) -> Record:
    param = None if error.param is None else carried(error.param)
    message = carried(str(error))
    return bounded({"type": "invalid_request_error", "message": message, "code": "invalid_input", "param": param})


def text_of(error: BaseException) -> str:
    """User exceptions may fail even at saying what they are."""
    try:
        return carried(str(error))
    except BaseException as second:
        return f"(its message raised {name_of(type(second))})"


def carried(text: str) -> str:
    """As it can be sent: without halves of surrogate pairs."""
    return text.encode(errors="replace").decode()


def hint(error: BaseException) -> str:
    if isinstance(error, MemoryError) and Allowance.memory_mb:
        return f" (it needed more than its memory_mb={Allowance.memory_mb})"
    if not isinstance(error, ModuleNotFoundError) or not isinstance(error.name, str) or not error.name:
        return ""
    name = error.name.partition(".")[0]
    return (
        f" (if {name}.py or a folder {name} lies beside the app's file, name it there: "
        f"stoker.App(..., include=({name + '.py'!r},)); if it is a package, install it on the workers: "
        f"pip install {name})"
    )
