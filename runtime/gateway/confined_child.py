"""The inside of a confined process: lines in, a JSON line out for each question; the kernel ends it when it uses too
much."""

import json
import os
import resource
import signal
import sys

from stoker.runtime.gateway.confined_process import MEMORY_BYTES

IDLE_S = 60.0
NICE = 5


def confine() -> None:
    """By default both timers' signals end the process, also in the middle of a single call into C."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICE)
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)


def next_line() -> bytes:
    signal.setitimer(signal.ITIMER_REAL, IDLE_S)
    return sys.stdin.buffer.readline()


def say(text: str, refused: str | None = None) -> None:
    told = refused if refused is None else refused[:2000]
    sys.stdout.buffer.write(json.dumps({"text": text, "refused": told}).encode() + b"\n")
    sys.stdout.buffer.flush()
