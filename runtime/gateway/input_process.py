"""Checks of a tenant's inputs in a process of its own, whose CPU time and memory end there and not at the gateway's."""

import json
import signal
import subprocess
import threading
import weakref
from typing import Any

from stoker.runtime.gateway.chat_template import TemplateRefused
from stoker.runtime.gateway.input_check import Complaint
from stoker.runtime.gateway.template_process import MEMORY_BYTES, ProcessEnded, dismiss, exchange, started
from stoker.runtime.requirement import InvalidSpec

CHECK_S = 2.0


class CheckEnded(Exception):
    """What became of a check that has no answer."""


class InputProcess:
    """One check at a time. Its process ends when it is idle and comes back when it is needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def complaint(self, schema: dict[str, Any], body: bytes) -> Complaint | None:
        """Of the JSON text `body`; without one only the schema is read. Raises InvalidSpec and CheckEnded."""
        text = json.dumps(schema).encode()
        question = b"%d %d\n%b%b" % (len(text), len(body), text, body)
        with self._lock:
            return self._asked(question)

    def _asked(self, question: bytes) -> Complaint | None:
        """A process that ended between two questions, because it was idle, is no answer."""
        while True:
            fresh = self._process is None
            try:
                return self._told(question)
            except ProcessEnded as ended:
                self._process = None
                self._dismiss()
                if fresh or ended.code != -signal.SIGALRM:
                    raise CheckEnded(why(ended.code)) from None

    def _told(self, question: bytes) -> Complaint | None:
        if self._process is None:
            self._process = started("input_child")
            self._dismiss = weakref.finalize(self, dismiss, self._process)
        try:
            answer = exchange(self._process, question)
        except TemplateRefused as refusal:
            raise InvalidSpec(str(refusal)) from None
        return Complaint(*json.loads(answer)) if answer else None


def why(code: int) -> str:
    if code == -signal.SIGPROF:
        return f"takes longer than {CHECK_S:g} s"
    return f"ended its process (return code {code}; it may have needed more than {MEMORY_BYTES >> 20} MiB of memory)"
