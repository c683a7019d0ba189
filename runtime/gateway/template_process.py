"""A tenant's chat template in a process of its own, whose CPU time and memory end there and not at the gateway's."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.runtime.gateway.chat_template import RENDER_S, Message, TemplateRefused

MEMORY_BYTES = 512 << 20
MOST_CHARACTERS = 16 << 20
MOST_ANSWER = 12 * MOST_CHARACTERS + 1024
PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "TZ", "LANG")
COMMAND = (sys.executable, "-P", "-m")


class ProcessEnded(Exception):
    """With the process's return code: minus the number of the signal that ended it."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class IsolatedTemplate:
    """Renders as ChatTemplate does, one conversation at a time. Its process ends when it is idle and comes back when
    it is needed."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self._compile = {"source": source, "tokens": dict(tokens)}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        with self._lock:
            self._asked(self._compile)

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
        """The prompt up to and including the header of the assistant's next turn. Raises TemplateRefused."""
        with self._lock:
            return self._asked({"messages": [dict(each) for each in messages], "tools": list(tools)})

    def _asked(self, question: Mapping[str, Any]) -> str:
        """A process that ended between two questions, because it was idle, is no refusal."""
        while True:
            fresh = self._process is None
            try:
                return self._told(question)
            except ProcessEnded as ended:
                self._process = None
                self._dismiss()
                if fresh or ended.code in (-signal.SIGPROF, -signal.SIGKILL):
                    raise TemplateRefused(why(ended.code)) from None

    def _told(self, question: Mapping[str, Any]) -> str:
        if self._process is None:
            self._process = started("template_child")
            self._dismiss = weakref.finalize(self, dismiss, self._process)
            compiled = exchange(self._process, line_of(self._compile))
            if question is self._compile:
                return compiled
        return exchange(self._process, line_of(question))


def line_of(question: Mapping[str, Any]) -> bytes:
    return json.dumps(question).encode() + b"\n"


def started(child: str) -> subprocess.Popen[bytes]:
    """Nothing of the gateway's environment, such as credentials, goes with it."""
    env = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    pipe = subprocess.PIPE
    command = (*COMMAND, f"stoker.runtime.gateway.{child}")
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=env, cwd="/")


def exchange(process: subprocess.Popen[bytes], question: bytes) -> str:
    """Raises TemplateRefused, and ProcessEnded when there was no whole answer."""
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
        raise TemplateRefused(answer["refused"])
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


def why(code: int) -> str:
    if code == -signal.SIGPROF:
        return f"it took longer than {RENDER_S:g} s to render"
    return f"it ended its process (return code {code}): it may have needed more than {MEMORY_BYTES >> 20} MiB of memory"
