"""The agent's end of its zygote: asks for forked children and learns how they ended."""

import asyncio
import itertools
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import msgpack

from stoker.coldstart.zygote import EXITED, FORKED, MAX_REQUEST, READY
from stoker.runtime.processes import parent_mark, start_child, stop_child

MODULE = "stoker.runtime.worker.zygote_process"
SECRETS = ("STOKER_", "AWS_")
KILLED = -signal.SIGKILL


def clean_environment() -> dict[str, str]:
    """Without the addresses and keys that only the agent needs. Waiting OpenMP threads sleep instead of spinning:
    torch reads that once, when it is imported."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(SECRETS)}
    return {"OMP_WAIT_POLICY": "PASSIVE", **kept}


class Forked:
    """A child of the zygote."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._exited = asyncio.Event()

    async def wait(self) -> int:
        await self._exited.wait()
        assert self.returncode is not None
        return self.returncode

    def end(self, code: int) -> None:
        self.returncode = code
        self._exited.set()


class ZygoteGone(OSError):
    """The zygote ended; the next request starts another."""


class ZygoteLink:
    """Starts the zygote early, so that its imports are done (at `ready_ns`) when the first worker is wanted."""

    def __init__(self, log: Path) -> None:
        self.ready_ns = 0
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._sock: socket.socket | None = None
        self._starting = asyncio.Lock()
        self._requests: dict[int, asyncio.Future[Forked]] = {}
        self._children: dict[int, Forked] = {}
        self._ids = itertools.count()

    async def start(self) -> None:
        async with self._starting:
            if self._sock is None:
                await self._start()

    async def close(self) -> None:
        if self._sock:
            self._bury("the agent stops")
        if self._process:
            await stop_child(self._process, grace_s=2.0)

    async def fork(
        self,
        module: str,
        *argv: str,
        name: str,
        env: dict[str, str],
        fds: tuple[int, ...],
        log: Path,
        new_session: bool = False,
    ) -> Forked:
        """A child that runs `module.main()` under `name`; `{0}`, `{1}`, ... in `argv` stand for its copies of `fds`.

        Raises ZygoteGone when the zygote died before it answered.
        """
        await self.start()
        assert self._sock is not None and self._process is not None
        number = next(self._ids)
        request: dict[str, Any] = {
            "id": number,
            "module": module,
            "name": name,
            "argv": argv,
            "env": {**env, **parent_mark(self._process.pid)},
            "log": str(log),
            "new_session": new_session,
        }
        answer: asyncio.Future[Forked] = asyncio.get_running_loop().create_future()
        # Looked at, or asyncio would complain when whoever asked has left.
        answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self._requests[number] = answer
        try:
            socket.send_fds(self._sock, [packed(request)], list(fds))
        except OSError as error:
            del self._requests[number]
            raise ZygoteGone(f"the zygote is gone ({error}); see {self._log}") from error
        return await asyncio.shield(answer)

    async def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            fd = theirs.fileno()
            self._process = await start_child(
                MODULE, "--socket-fd", str(fd), env=clean_environment(), pass_fds=(fd,), log=self._log
            )
        self._sock = ours
        asyncio.get_running_loop().add_reader(ours, self._on_readable)

    def _on_readable(self) -> None:
        assert self._sock is not None
        try:
            data = self._sock.recv(MAX_REQUEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._on_message(msgpack.unpackb(data))
        else:
            self._bury(f"the zygote died before it answered; see {self._log}")

    def _on_message(self, message: dict[str, Any]) -> None:
        if message["t"] == READY:
            self.ready_ns = time.monotonic_ns()
        elif message["t"] == FORKED:
            child = self._children[message["pid"]] = Forked(message["pid"])
            if not (answer := self._requests.pop(message["id"])).done():
                answer.set_result(child)
        elif message["t"] == EXITED:
            self._children.pop(message["pid"]).end(message["code"])

    def _bury(self, why: str) -> None:
        """Its children die with it; `why` is told to those who wait for one."""
        assert self._sock is not None
        asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()
        self._sock = None
        for child in self._children.values():
            child.end(KILLED)
        self._children.clear()
        for answer in self._requests.values():
            if not answer.done():
                answer.set_exception(ZygoteGone(why))
        self._requests.clear()


def start_phases(name: str, started_ns: int, ready_ns: int) -> list[dict[str, Any]]:
    """A process's start until now, apart from what it waited for a zygote that was still importing."""
    forked_ns = max(started_ns, ready_ns)
    waited = [{"name": "wait for zygote", "start_ns": started_ns, "end_ns": forked_ns}]
    start = {"name": name, "start_ns": forked_ns, "end_ns": time.monotonic_ns()}
    return [*(waited if forked_ns > started_ns else []), start]


def packed(request: dict[str, Any]) -> bytes:
    data: bytes = msgpack.packb(request)  # type: ignore[assignment]
    if len(data) > MAX_REQUEST:
        raise ZygoteGone(f"a request of {len(data)} bytes is more than the zygote reads")
    return data
