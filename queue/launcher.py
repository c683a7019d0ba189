"""Becomes another program that can't outlive its parent: `python launcher.py PARENT_PID PROGRAM [ARGUMENT ...]`.

A process of its own, because running code between fork and exec in a process with threads may deadlock.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, program, *arguments = sys.argv[1:]
    if sys.platform == "linux":
        # SIGKILL: a server inside a long script answers SIGTERM late; its append-only file is already written.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        raise SystemExit("the parent ended before its child started")
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main()
