"""Where functions run as the worker's own user, they can't read the secrets in the agent's environment and memory."""

import os
import signal
from collections.abc import Callable

import pytest

from stoker.runtime.processes import hide_from_peers
from stoker.runtime.worker.confinement import become
from stoker.runtime.worker.workplace import FIRST_UID, PLACES

UID = FIRST_UID + PLACES + 1


def forked(work: Callable[[], int]) -> int:
    """The pid of a child that exits with what `work` returns."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        become(UID)
        code = work()
    finally:
        os._exit(code)


def held(hidden: bool) -> tuple[int, int]:
    """A process that stays, and a pipe's end that it holds while it does."""
    ready, told = os.pipe()
    waits, lets_go = os.pipe()

    def stay() -> int:
        os.close(lets_go)
        if hidden:
            hide_from_peers()
        os.write(told, b"x")
        os.read(waits, 1)
        return 0

    pid = forked(stay)
    os.close(waits)
    os.close(told)
    os.read(ready, 1)
    os.close(ready)
    return pid, lets_go


def can_read(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            file.read(1)
    except PermissionError:
        return 0
    return 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes as other users")
@pytest.mark.parametrize("hidden", [False, True])
def test_a_peer_of_the_same_user_reads_the_environment_unless_it_is_hidden(hidden: bool) -> None:
    pid, lets_go = held(hidden)
    try:
        _, status = os.waitpid(forked(lambda: can_read(pid)), 0)
    finally:
        os.close(lets_go)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == (0 if hidden else 1)
