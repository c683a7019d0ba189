"""What a function process gives up before it runs user code: the worker's environment, its user, memory without end."""

import os
import resource
import signal
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

from stoker.runtime.processes import PR_SET_DUMPABLE, PR_SET_PDEATHSIG, prctl

PR_SET_NO_NEW_PRIVS = 38
STACK_BYTES = 8 << 20


def confine(start: dict[str, Any]) -> None:
    """As the agent's first frame says. Afterwards nothing of the worker's can be read that its user may not read."""
    os.environ.clear()
    os.environ.update(start["env"])
    tempfile.tempdir = None
    if start["memory_mb"]:
        limit_memory(start["memory_mb"] << 20, start["concurrency"])
    if start["uid"]:
        become(start["uid"])
    if sys.platform == "linux":
        prctl(PR_SET_NO_NEW_PRIVS, 1)


def become(uid: int) -> None:
    """The kernel forgets the death signal of a process that changes its user."""
    parent = os.getppid()
    os.setgroups(device_groups())
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    prctl(PR_SET_DUMPABLE, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def device_groups() -> list[int]:
    """Groups through which GPUs are reached where they aren't open to everybody."""
    facts = [device.stat() for device in Path("/dev").glob("nvidia*") if device.is_char_device()]
    shut = [fact for fact in facts if not fact.st_mode & stat.S_IWOTH and fact.st_mode & stat.S_IWGRP]
    return sorted({fact.st_gid for fact in shut} - {0})


def limit_memory(size: int, concurrency: int) -> None:
    """On what it may allocate from now on: an allocation beyond it raises MemoryError. Stacks of threads, which are
    hardly ever used up, don't count."""
    stacks = (concurrency + 2 * (os.cpu_count() or 1) + 4) * STACK_BYTES
    most = data_bytes() + size + stacks
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def data_bytes() -> int:
    """Private writable memory that this process has now."""
    with open("/proc/self/status") as status:
        kilobytes = next(line.split()[1] for line in status if line.startswith("VmData:"))
    return int(kilobytes) << 10
