"""A process that has imported what takes long, and forks a ready child for each request.

It stays single-threaded, opens no CUDA context and runs no parallel CPU kernel, so that its children may do all three.
Requests come over a SOCK_SEQPACKET pair: one msgpack map with the child's descriptors attached, answered with its pid
and, later, its exit status.
"""

import ctypes
import gc
import importlib
import os
import random
import selectors
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

import msgpack

MAX_REQUEST = 1 << 16
MAX_FDS = 8
MAX_NAME = 15
PR_SET_NAME = 15
READY, FORKED, EXITED = "ready", "forked", "exited"


def preload(modules: list[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


class Zygote:
    """Serves one agent until its end of the socket closes."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ, None)

    def serve(self) -> None:
        self._reply({"t": READY})
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._reap(key.fd, key.data)
                elif not self._answer():
                    return

    def _answer(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._sock, MAX_REQUEST, MAX_FDS)
        if not data:
            return False
        request = msgpack.unpackb(data)
        pid = os.fork()
        if pid == 0:
            self._become(request, fds)
        for fd in fds:
            os.close(fd)
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        self._reply({"t": FORKED, "id": request["id"], "pid": pid})
        return True

    def _reap(self, pidfd: int, pid: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._reply({"t": EXITED, "pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _reply(self, message: dict[str, Any]) -> None:
        data: bytes = msgpack.packb(message)  # type: ignore[assignment]
        try:
            self._sock.send(data)
        except OSError:
            sys.exit(0)

    def _become(self, request: dict[str, Any], fds: list[int]) -> NoReturn:
        """Never returns to the zygote's loop, whatever the child's main does."""
        code = 1
        try:
            self._let_go()
            code = run_main(request, fds)
        except BaseException as error:
            traceback.print_exception(error)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _let_go(self) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                os.close(key.fd)
        self._selector.close()
        self._sock.close()


def run_main(request: dict[str, Any], fds: list[int]) -> int:
    """The exit code of `main()` of the requested module, run as if it had been started alone. To end with the zygote
    is up to that main, as it is for a process that was started alone."""
    if request["new_session"]:
        os.setsid()
    show_name(request["name"])
    redirect_output(request["log"])
    os.environ.update(request["env"])
    reseed()
    sys.argv = [request["module"], *(argument.format(*fds) for argument in request["argv"])]
    try:
        importlib.import_module(request["module"]).main()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    return 0


def show_name(name: str) -> None:
    """What `ps` and `top` call the process; its command line stays the zygote's."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:MAX_NAME], 0, 0, 0)


def redirect_output(path: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def reseed() -> None:
    """Children must not draw the same random numbers."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()


def serve(socket_fd: int, modules: list[str]) -> None:
    """Imports `modules`, then forks until the agent closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    preload(modules)
    Zygote(socket.socket(fileno=socket_fd)).serve()
