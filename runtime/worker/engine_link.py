"""The agent's end of one engine process: starts it, speaks its frames, and tells every model's owner when it dies."""

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.coldstart.ring import Ring
from stoker.runtime.processes import stop_child
from stoker.runtime.wire import AsyncChannel, ChannelClosed, Frame, socket_pair
from stoker.runtime.worker.kernel_store import KernelCache
from stoker.runtime.worker.zygote_link import Forked, ZygoteLink, start_phases

MODULE = "stoker.runtime.engine.process"


class EngineDied(Exception):
    """The engine process ended while it held models."""


@dataclass
class ModelPort:
    """One model's view of the engine: frames in through callbacks, `gone` when the process died."""

    on_frame: Callable[[Frame], None]
    on_gone: Callable[[str], None]


@dataclass
class EngineLink:
    """One engine process, started with the first model and stopped with the last. `kernels` is where it finds compiled
    kernels and leaves those it had to compile: an empty folder at its start. `device_bytes` bounds what its models have
    of the device (0: what is free)."""

    device: str
    ring: Ring
    zygote: ZygoteLink
    log: Path
    kernels: KernelCache
    device_bytes: int = 0
    stats: Frame = field(default_factory=dict)
    _spent: Counter[str] = field(default_factory=Counter)
    _born: float = 0.0
    _ports: dict[str, ModelPort] = field(default_factory=dict)
    _process: Forked | None = None
    _channel: AsyncChannel | None = None
    _reader: asyncio.Task[None] | None = None
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _hello: asyncio.Future[Frame] | None = None
    _users: int = 0
    _leaving: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.returncode is None else None

    async def enter(self) -> dict[str, Any]:
        """Takes part in the process, starting it if needed; returns its start phases. Pair with `leave`."""
        self._users += 1
        started = asyncio.create_task(self._start_once())
        try:
            return await asyncio.shield(started)
        except BaseException:
            started.add_done_callback(self._leave_later)
            raise

    def hold(self) -> None:
        """One more use of a process that is there. Pair with `leave`."""
        self._users += 1

    async def leave(self) -> None:
        """Gives up one use; the last one stops the process, so that an idle host holds no device memory."""
        self._users -= 1
        if self._users == 0:
            async with self._starting:
                if self._users == 0:
                    await self._stop()

    async def _start_once(self) -> dict[str, Any]:
        async with self._starting:
            return await self._start() if self._channel is None else {"phases": []}

    def _leave_later(self, started: asyncio.Task[dict[str, Any]]) -> None:
        """Whoever was cancelled while the process started can't wait for it; its use is given up when it is there."""
        if not started.cancelled():
            started.exception()
        self._leaving = asyncio.create_task(self.leave())

    def device_time(self) -> dict[str, int]:
        """Microseconds of all engine processes of this device so far, by what it did: busy (of which requests were
        charged, or nobody wanted it any more), swap, load, idle. What nobody knows of a process that died is `lost`."""
        return dict(self._spent + Counter(self.stats.get("time", {})))

    def open(self, model: str, port: ModelPort) -> None:
        self._ports[model] = port

    def close(self, model: str) -> None:
        self._ports.pop(model, None)

    def send(self, frame: Frame) -> None:
        if self._channel is None:
            raise EngineDied("the engine process is not running")
        try:
            self._channel.send(frame)
        except ChannelClosed as error:
            raise EngineDied(str(error)) from error

    def ask_stats(self) -> None:
        """The answer arrives in `stats` a moment later, unless a long step is on its way."""
        with contextlib.suppress(EngineDied):
            self.send({"t": "stats"})

    async def _start(self) -> dict[str, Any]:
        started = time.monotonic_ns()
        await asyncio.to_thread(self.kernels.empty)
        sock, fd = socket_pair()
        try:
            self._process = await self.zygote.fork(
                MODULE,
                *("--socket-fd", "{0}"),
                *("--ring-fd", "{1}"),
                *("--ring-slots", str(self.ring.slots)),
                *("--device-bytes", str(self.device_bytes)),
                name="stoker-engine",
                env=device_environment(self.device) | kernel_environment(self.kernels.folder),
                fds=(fd, self.ring.fd),
                log=self.log,
            )
        finally:
            os.close(fd)
        self._channel = await AsyncChannel.open(sock)
        self._hello = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read(self._channel, self._hello))
        hello = await self._hello
        self._born = time.monotonic()
        spawn = start_phases("engine process start", started, self.zygote.ready_ns)
        return {"phases": [*spawn, *hello.get("phases", [])]}

    async def _read(self, channel: AsyncChannel, hello: asyncio.Future[Frame]) -> None:
        try:
            while True:
                for frame in await channel.frames():
                    self._dispatch(frame, hello)
        except ChannelClosed:
            await self._bury(hello)

    def _dispatch(self, frame: Frame, hello: asyncio.Future[Frame]) -> None:
        if frame["t"] == "hello":
            hello.set_result(frame)
        elif frame["t"] == "stats":
            self.stats = frame
        elif port := self._ports.get(frame.get("model", "")):
            port.on_frame(frame)

    async def _bury(self, hello: asyncio.Future[Frame]) -> None:
        self._count_life()
        process, self._channel, self._process, self.stats = self._process, None, None, {}
        code = await process.wait() if process else None
        reason = f"engine process ended with {describe_exit(code)}; {see(self.log)}"
        if not hello.done():
            hello.set_exception(EngineDied(reason))
            hello.exception()
        for port in list(self._ports.values()):
            port.on_gone(reason)

    def _count_life(self) -> None:
        known = Counter(self.stats.get("time", {}))
        lived_us = int((time.monotonic() - self._born) * 1e6) if self._born else 0
        lost = max(0, lived_us - known["wall"])
        self._spent.update(known, lost=lost)
        self._spent["wall"] += lost
        self._born = 0.0

    async def _stop(self) -> None:
        process, channel = self._process, self._channel
        if process is None or channel is None:
            return
        await dismiss(process, channel, grace_s=5.0)
        if self._reader:
            await self._reader


async def dismiss(process: Forked, channel: AsyncChannel, grace_s: float, *, group: bool = False) -> None:
    """The process is asked to stop, then made to."""
    with contextlib.suppress(ChannelClosed):
        channel.send({"t": "stop"})
    await stop_child(process, grace_s, group=group)
    await channel.close()


def device_environment(device: str) -> dict[str, str]:
    """`cuda:3` becomes the only visible GPU, so that the process never opens a context on another one."""
    if device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    return {"CUDA_VISIBLE_DEVICES": device.partition(":")[2] or "0"}


def kernel_environment(folder: Path) -> dict[str, str]:
    """Where Triton keeps what it compiled, and that nothing but the device's code is worth keeping."""
    return {"TRITON_CACHE_DIR": str(folder), "TRITON_STORE_BINARY_ONLY": "1"}


def see(log: Path) -> str:
    """For callers, whom the host's folders don't concern."""
    return f"see {log.parent.name}/{log.name} in the worker's data folder"


def describe_exit(code: int | None) -> str:
    if code is None:
        return "an unknown status"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
