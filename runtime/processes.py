"""Child processes that never outlive their parent, whatever kills it (Linux: PR_SET_PDEATHSIG)."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Protocol

PARENT = "STOKER_PARENT_PID"
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4


def die_with_parent() -> None:
    """First call of every child's main(). The parent may have died before this line, so its pid is compared too."""
    expected = os.environ.pop(PARENT, None)
    if expected is None or sys.platform != "linux":
        return
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(expected):
        os._exit(1)


def hide_from_peers() -> None:
    """From here on other processes of the same user can't read this one's environment and memory (Linux)."""
    if sys.platform == "linux":
        prctl(PR_SET_DUMPABLE, 0)


def prctl(option: int, value: int) -> None:
    """Linux only."""
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


async def start_child(
    module: str,
    *arguments: str,
    env: dict[str, str],
    pass_fds: tuple[int, ...] = (),
    log: Path,
) -> asyncio.subprocess.Process:
    """Runs `python -m module arguments` with exactly `env`. Call it from the main thread: the death signal follows the
    thread that starts the child."""
    with open(log, "ab", buffering=0) as output:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            # Without the folder where it was started, whose files could stand for modules in a function.
            "-P",
            "-m",
            module,
            *arguments,
            env={**env, **parent_mark(os.getpid()), "PYTHONUNBUFFERED": "1"},
            pass_fds=pass_fds,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


def parent_mark(pid: int) -> dict[str, str]:
    """What `die_with_parent` of a child of process `pid` must find in its environment."""
    return {PARENT: str(pid)}


class Process(Protocol):
    """A child of this process, or of its zygote."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...


async def stop_child(process: Process, grace_s: float, *, group: bool = False) -> None:
    """SIGTERM, then SIGKILL after `grace_s`; `group` when the child leads a session of its own."""
    send_signal(process, signal.SIGTERM, group)
    try:
        await asyncio.wait_for(process.wait(), grace_s)
    except TimeoutError:
        send_signal(process, signal.SIGKILL, group)
        await process.wait()


def send_signal(process: Process, number: signal.Signals, group: bool) -> None:
    if process.returncode is not None and not group:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if group:
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid, number)
