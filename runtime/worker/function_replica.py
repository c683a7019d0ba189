"""A user's Python function on this host: its own process, fed with batches."""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from stoker.queue.records import Claim, pack, unpack
from stoker.runtime.processes import send_signal
from stoker.runtime.spec import FunctionSpec
from stoker.runtime.wire import AsyncChannel, ChannelClosed, Frame, socket_pair
from stoker.runtime.worker.bundles import unpack_bundle
from stoker.runtime.worker.engine_link import describe_exit, dismiss, see
from stoker.runtime.worker.host import Host
from stoker.runtime.worker.replica import Record, Replica, Start, StartFailed
from stoker.runtime.worker.zygote_link import Forked, start_phases

MODULE = "stoker.runtime.worker.function_process"
ABORT_GRACE_S = 2.0


class FunctionReplica(Replica):
    """Jobs of one batch run in one call; a job that is lost while it runs is ignored, then its process is killed."""

    def __init__(self, id: str, spec: FunctionSpec, host: Host, start: Start) -> None:
        super().__init__(id, spec, host, start)
        self._process: Forked | None = None
        self._channel: AsyncChannel | None = None
        self._reader: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._overdue: dict[str, asyncio.TimerHandle] = {}
        self._busy: set[frozenset[str]] = set()
        self._log: Path = host.log(f"function-{spec.name}")

    @property
    def _batch_size(self) -> int:
        return self.spec.batch.max_size if self.spec.batch else 1

    async def load(self) -> None:
        self.state = "loading"
        with self.timeline.phase("fetch code"):
            folder = await asyncio.to_thread(unpack_bundle, self.host.settings, self.spec.code)
        started = time.monotonic_ns()
        await self._spawn(folder)
        ready = await self._ready
        spawn = start_phases("function process start", started, self.host.zygote.ready_ns)
        self.timeline.extend([*spawn, *ready["phases"]])

    async def _spawn(self, folder: Path) -> None:
        sock, fd = socket_pair()
        try:
            self._process = await self.host.zygote.fork(
                MODULE,
                *("--socket-fd", "{0}"),
                *("--folder", str(folder)),
                *("--entry", self.spec.entry),
                *("--concurrency", str(self.spec.concurrency)),
                name="stoker-function",
                env={},
                fds=(fd,),
                log=self._log,
                new_session=True,
            )
        finally:
            os.close(fd)
        self._channel = await AsyncChannel.open(sock)
        self._reader = asyncio.create_task(self._read(self._channel))
        self._watcher = asyncio.create_task(self._watch(self._process, self._channel))

    async def unload(self) -> None:
        process, channel = self._process, self._channel
        if process is None or channel is None:
            return
        await dismiss(process, channel, ABORT_GRACE_S, group=True)
        for task in (self._reader, self._watcher):
            if task:
                await task

    async def take_work(self) -> None:
        free = await self.room()
        if free and (claims := await self.claim(free)):
            self._send_batch(await self._fill(claims))

    def free(self) -> int:
        if len(self._busy) >= self.spec.concurrency:
            return 0
        return min(self._batch_size, self._batch_size * self.spec.concurrency - len(self.held))

    async def _fill(self, claims: list[Claim]) -> list[Claim]:
        """Waits for companions of the same batch key until the batch is full or its oldest member has waited enough."""
        if self.spec.batch is None:
            return claims
        deadline = time.monotonic() + self.spec.batch.max_wait_ms / 1000
        while len(claims) < self._batch_size and (left := deadline - time.monotonic()) > 0:
            await self.host.bells.wait(self.spec.name, left)
            claims += await self.claim_now(self._batch_size - len(claims))
        return claims

    def _send_batch(self, claims: list[Claim]) -> None:
        batch = [claim for claim in claims if claim.job_id in self.held]
        if not batch or self._channel is None:
            return
        self._busy.add(frozenset(claim.job_id for claim in batch))
        items = [[claim.job_id, unpack(claim.payload)["input"]] for claim in batch]
        with contextlib.suppress(ChannelClosed):
            self._channel.send({"t": "call", "batched": self.spec.batch is not None, "items": items})

    def abort(self, job_id: str) -> None:
        """User code can't be interrupted: if it is still at it after a moment, its process is killed."""
        loop = asyncio.get_running_loop()
        if any(job_id in batch for batch in self._busy):
            self._overdue[job_id] = loop.call_later(ABORT_GRACE_S, self._kill_if_alone, job_id)

    def _kill_if_alone(self, job_id: str) -> None:
        batch = next((batch for batch in self._busy if job_id in batch), None)
        if batch is None:
            return
        if batch & self.held.keys():
            self._overdue[job_id] = asyncio.get_running_loop().call_later(ABORT_GRACE_S, self._kill_if_alone, job_id)
        elif self._process and self._process.returncode is None:
            send_signal(self._process, signal.SIGKILL, group=True)

    async def _watch(self, process: Forked, channel: AsyncChannel) -> None:
        """Its exit counts, not the end of its channel: what user code forked may hold that open."""
        await process.wait()
        send_signal(process, signal.SIGKILL, group=True)
        await channel.close()

    async def _read(self, channel: AsyncChannel) -> None:
        try:
            while True:
                self._on_frame(await channel.receive())
        except ChannelClosed:
            await self._on_gone()

    def _on_frame(self, frame: Frame) -> None:
        match frame["t"]:
            case "ready" if not self._ready.done():
                self._ready.set_result(frame)
            case "load_error" if not self._ready.done():
                self._ready.set_exception(StartFailed(frame["error"]))
            case "chunk":
                self._on_chunk(frame["id"], frame["value"])
            case "results":
                self._on_results(frame["items"])

    def _on_chunk(self, job_id: str, value: Any) -> None:
        claim = self.held.get(job_id)
        if claim and claim.stream:
            self.outbox.emit(job_id, claim.fence, pack({"value": value}))

    def _on_results(self, items: list[list[Any]]) -> None:
        finished = frozenset(item[0] for item in items)
        self._busy.discard(finished)
        for job_id, succeeded, value in items:
            if timer := self._overdue.pop(job_id, None):
                timer.cancel()
            claim = self.held.get(job_id)
            if claim is None:
                continue
            if succeeded:
                self.complete(claim, {"value": value}, {})
            else:
                self.fail(claim, value, retry=False)
        self._room.set()

    async def _on_gone(self) -> None:
        code = await self._process.wait() if self._process else None
        error: Record = {
            "type": "function_error",
            "message": f"the process of function {self.spec.name!r} ended with {describe_exit(code)}; {see(self._log)}",
            "code": "process_died",
        }
        if not self._ready.done():
            self._ready.set_exception(StartFailed(error))
        elif self.held or not self._stopping.is_set():
            self.crash(error)
