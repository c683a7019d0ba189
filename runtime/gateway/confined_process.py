"""Work for one tenant in a process of its own, whose CPU time and memory end there and not at the gateway's."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

MEMORY_BYTES = 512 << 20
MOST_CHARACTERS = 16 << 20
MOST_ANSWER = 12 * MOST_CHARACTERS + 1024
PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "TZ", "LANG")
COMMAND = (sys.executable, "-P", "-m")


class Refused(Exception):
    """The process's own words."""


class ProcessEnded(Exception):
    """With the process's return code: minus the number of the signal that ended it."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class ConfinedProcess:
    """Runs the module `child`, which reads `first`, if that is given, and then one question at a time. Its process ends
    when it is idle and comes back when it is needed. `was_idle`: of a return code, whether the question may be asked
    again."""

    def __init__(self, child: str, was_idle: Callable[[int], bool], first: bytes = b"") -> None:
        self._child, self._was_idle, self._first = child, was_idle, first
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: bytes = b"") -> str:
        """Without a question `first` alone is answered. Blocking; raises Refused, and ProcessEnded for a process that
        didn't end between two questions."""
        with self._lock:
            while True:
                fresh = self._process is None
                try:
                    return self._told(question)
                except ProcessEnded as ended:
                    self._process = None
                    self._dismiss()
                    if fresh or not self._was_idle(ended.code):
                        raise

    def _told(self, question: bytes) -> str:
        if self._process is None:
            self._process = started(self._child)
            self._dismiss = weakref.finalize(self, dismiss, self._process)
            answer = exchange(self._process, self._first) if self._first else ""
            if not question:
                return answer
        return exchange(self._process, question)


def started(child: str) -> subprocess.Popen[bytes]:
    """Nothing of the gateway's environment, such as credentials, goes with it."""
    env = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    pipe = subprocess.PIPE
    command = (*COMMAND, f"stoker.runtime.gateway.{child}")
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=env, cwd="/")


def exchange(process: subprocess.Popen[bytes], question: bytes) -> str:
    """Raises Refused, and ProcessEnded when there was no whole answer."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(question)
        process.stdin.flush()
        line = process.stdout.readline(MOST_ANSWER)
    except BrokenPipeError:
        line = b""
    if not line.endswith(b"\n"):
        raise ProcessEnded(end(process))
    answer = json.loads(line)
    if answer["refused"] is not None:
        raise Refused(answer["refused"])
    return answer["text"]


def end(process: subprocess.Popen[bytes]) -> int:
    """Of one that closed its end, its own return code."""
    try:
        return process.wait(0.5)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def dismiss(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.kill()
    process.wait()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()
