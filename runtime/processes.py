"""Child processes that never outlive their parent, whatever kills it (Linux: PR_SET_PDEATHSIG)."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

PARENT = "STOKER_PARENT_PID"
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """First call of every child's main(). The parent may have died before this line, so its pid is compared too."""
    expected = os.environ.pop(PARENT, None)
    if expected is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(expected):
        os._exit(1)


async def start_child(
    module: str,
    *arguments: str,
    env: dict[str, str] | None = None,
    pass_fds: tuple[int, ...] = (),
    log: Path | None = None,
    new_session: bool = False,
) -> asyncio.subprocess.Process:
    """Runs `python -m module arguments`. Must be called from the main thread: the death signal follows the thread."""
    output = open(log, "ab", buffering=0) if log else None  # noqa: SIM115 - handed to the child, closed below
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *arguments,
            env={**os.environ, **(env or {}), PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
            pass_fds=pass_fds,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=new_session,
        )
    finally:
        if output:
            output.close()


async def stop_child(process: asyncio.subprocess.Process, grace_s: float, *, group: bool = False) -> None:
    """SIGTERM, then SIGKILL after `grace_s`; `group` when the child was started in a session of its own."""
    send_signal(process, signal.SIGTERM, group)
    try:
        await asyncio.wait_for(process.wait(), grace_s)
    except TimeoutError:
        send_signal(process, signal.SIGKILL, group)
        await process.wait()


def send_signal(process: asyncio.subprocess.Process, number: signal.Signals, group: bool) -> None:
    if process.returncode is not None and not group:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if group:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
