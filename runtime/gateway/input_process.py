"""Checks of a tenant's inputs in a process of its own."""

import json
import signal
from typing import Any

from stoker.runtime.gateway.confined_process import MEMORY_BYTES, ConfinedProcess, ProcessEnded, Refused
from stoker.runtime.gateway.input_check import Complaint
from stoker.runtime.requirement import InvalidSpec

CHECK_S = 2.0


class CheckEnded(Exception):
    """What became of a check that has no answer."""


class InputProcess:
    """One check at a time."""

    def __init__(self) -> None:
        self._confined = ConfinedProcess("input_child", was_idle)

    def complaint(self, schema: dict[str, Any], body: bytes) -> Complaint | None:
        """Of the JSON text `body`; without one only the schema is read. Raises InvalidSpec and CheckEnded."""
        text = json.dumps(schema).encode()
        try:
            answer = self._confined.ask(b"%d %d\n%b%b" % (len(text), len(body), text, body))
        except Refused as refusal:
            raise InvalidSpec(str(refusal)) from None
        except ProcessEnded as ended:
            raise CheckEnded(why(ended.code)) from None
        return Complaint(*json.loads(answer)) if answer else None


def was_idle(code: int) -> bool:
    return code == -signal.SIGALRM


def why(code: int) -> str:
    if code == -signal.SIGPROF:
        return f"takes longer than {CHECK_S:g} s"
    return f"ended its process (return code {code}; it may have needed more than {MEMORY_BYTES >> 20} MiB of memory)"
