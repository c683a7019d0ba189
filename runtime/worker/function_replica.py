"""A user's Python function on this host: its own process, fed with batches."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.queue.records import Claim, pack, unpack
from stoker.runtime.error_record import MOST_NAME
from stoker.runtime.processes import send_signal
from stoker.runtime.spec import FunctionSpec, owner_of, short_name, variable_of
from stoker.runtime.tenancy.vault import SecretUnreadable
from stoker.runtime.wire import AsyncChannel, ChannelClosed, Frame, socket_pair
from stoker.runtime.worker.bundles import unpack_bundle
from stoker.runtime.worker.engine_link import describe_exit, dismiss
from stoker.runtime.worker.function_access import FunctionAccess
from stoker.runtime.worker.host import Host
from stoker.runtime.worker.log_capture import Capture, jobs_of
from stoker.runtime.worker.memory_watch import beyond
from stoker.runtime.worker.replica import Record, Replica, Start, StartFailed
from stoker.runtime.worker.workplace import Workplace, take_place
from stoker.runtime.worker.zygote_link import Forked, start_phases

MODULE = "stoker.runtime.worker.function_process"
ABORT_GRACE_S = 2.0
MOST_PHASES = 8
MOST_SENT = 64
WHY = {"cancelled": "was cancelled", "timed_out": "timed out", "lost": "was given to another worker"}
HANDED_BACK = "was handed back to the queue"
# What a start does, as its process tells it and as people are told.
STEPS = {"import code": "importing its code", "load step": "running its load step"}


@dataclass(frozen=True, slots=True)
class Ending:
    """Of a process, for the jobs that ran in it. `fault`: something went wrong."""

    how: str
    code: str = "process_died"
    fault: bool = True

    def record(self, name: str) -> Record:
        message = f"function {name!r} was lost: {self.how}; `stoker logs {name}` shows what it said"
        return {"type": "function_error", "message": message, "code": self.code}


class FunctionReplica(Replica):
    """Jobs of one batch run in one call. A call that nobody wants any more is cancelled, which async code and
    generators hear; until it has ended it keeps its place. The process is killed for it only when that is all it does.
    """

    isolation = "own-process"

    def __init__(self, id: str, spec: FunctionSpec, host: Host, start: Start) -> None:
        super().__init__(id, spec, host, start)
        self._place: Workplace | None = None
        self._process: Forked | None = None
        self._channel: AsyncChannel | None = None
        self._reader: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._memory: asyncio.Task[None] | None = None
        self._reasons: dict[str, str] = {}
        self._unwanted: dict[frozenset[str], asyncio.TimerHandle] = {}
        self._overdue: dict[frozenset[str], str] = {}
        self._ending: Ending | None = None
        self._step = "fetching its code"
        self._closed = False
        self._dismissed = False
        self._busy: set[frozenset[str]] = set()
        self._calls: dict[str, frozenset[str]] = {}
        self._sent: dict[str, int] = {}
        self._access = FunctionAccess(host.passes, host.settings.gateway_url)
        self._output = Capture(self.log, self._calls.keys)

    @property
    def _batch_size(self) -> int:
        return self.spec.batch.max_size if self.spec.batch else 1

    async def load(self) -> None:
        self.state = "loading"
        with self.timeline.phase("fetch code"):
            bundle = await asyncio.to_thread(unpack_bundle, self.host.settings, self.spec.code)
            self._place = await asyncio.to_thread(take_place, bundle)
        variables = {**await self._secrets(), **await self._access.open(owner_of(self.spec.name))}
        started = time.monotonic_ns()
        self._step = "starting its process"
        await self._spawn(self._place, variables)
        ready = await self._ready
        spawn = start_phases("function process start", started, self.host.zygote.ready_ns)
        self.timeline.extend([*spawn, *phases_of(ready)])

    async def _secrets(self) -> dict[str, str]:
        """By variable."""
        try:
            values = await self.host.vault.values(owner_of(self.spec.name), self.spec.secrets)
        except SecretUnreadable as error:
            failure = {"type": "function_error", "message": str(error), "code": "secret_unreadable"}
            raise StartFailed(failure) from error
        return {variable_of(name): value for name, value in values.items()}

    async def _spawn(self, place: Workplace, variables: Mapping[str, str]) -> None:
        sock, fd = socket_pair()
        try:
            self._process = await self.host.zygote.fork(
                MODULE,
                *("--socket-fd", "{0}"),
                *("--mark", self._output.mark, "--output-fds", "{1}", "{2}"),
                name="stoker-function",
                env={},
                fds=(fd, *self._output.fds),
                log=self.host.log("function-starts"),
                new_session=True,
            )
        finally:
            os.close(fd)
            self._output.started()
        self._channel = await AsyncChannel.open(sock)
        self._reader = asyncio.create_task(self._read(self._process, self._channel))
        self._watcher = asyncio.create_task(self._watch(self._process, self._channel))
        if self.spec.memory_mb:
            self._memory = asyncio.create_task(self._keep_to(self.spec.memory_mb << 20, self._process))
        with contextlib.suppress(ChannelClosed):
            self._channel.send(start_frame(self.spec, place, variables))

    async def _keep_to(self, most: int, process: Forked) -> None:
        size = await beyond(process.pid, most)
        self._end(process, Ending(f"it used {size >> 20} MB, more than its memory_mb={most >> 20}", "memory_exceeded"))

    async def unload(self) -> None:
        if self._memory:
            self._memory.cancel()
        process, channel = self._process, self._channel
        if process is not None and channel is not None:
            self._dismissed = True
            await dismiss(process, channel, ABORT_GRACE_S, group=True)
        for task in (self._reader, self._watcher):
            if task:
                await task
        for timer in self._unwanted.values():
            timer.cancel()
        self._output.close()
        await self._access.close()
        if self._place is not None:
            await asyncio.to_thread(self._place.leave)

    def report(self) -> Record:
        return {**super().report(), "step": self._step}

    async def last_words(self) -> str:
        return f"stopped: {self._ending.how}" if self._ending and not self._ending.fault else await super().last_words()

    async def take_work(self) -> None:
        free = await self.room()
        if free and (claims := await self.claim(free)):
            async for group in self.company.groups(await self._fill(claims)):
                self._send_batch(group)

    def free(self) -> int:
        """Jobs of one batch, or of as many calls as may begin."""
        calls = self.spec.concurrency - len(self._busy)
        if calls <= 0:
            return 0
        room = self._batch_size * self.spec.concurrency - len(self.held)
        return min(self._batch_size if self.spec.batch else calls, room)

    def begun(self, job_id: str) -> bool:
        return self._sent.get(job_id) == self.held[job_id].fence

    async def _fill(self, claims: list[Claim]) -> list[Claim]:
        """Waits for companions of the same batch key until the batch is full or its oldest member has waited enough."""
        if self.spec.batch is None:
            return claims
        deadline = time.monotonic() + self.spec.batch.max_wait_ms / 1000
        while (
            not self._stopping.is_set() and len(claims) < self._batch_size and (left := deadline - time.monotonic()) > 0
        ):
            await self.host.bells.wait(self.spec.name, left)
            claims += await self.claim_now(self._batch_size - len(claims))
        return claims

    def _send_batch(self, claims: list[Claim]) -> None:
        """What came back to this replica while an unwanted call of the same job runs waits for that to end. What can't
        be sent goes back as it came."""
        running = () if self._closed else self._calls
        batch = [claim for claim in claims if claim.job_id in self.held and claim.job_id not in running]
        if not batch:
            return
        self._output.drain()
        bodies = [(claim, unpack(claim.payload)) for claim in batch]
        bodies = [(claim, body) for claim, body in bodies if self.aside.takes(claim, body)]
        batch = [claim for claim, _ in bodies]
        items = [[claim.job_id, body["input"]] for claim, body in bodies]
        if not self._closed and self._send({"t": "call", "batched": self.spec.batch is not None, "items": items}):
            self._enter_calls(batch)
            return
        for claim in batch:
            self._give_back(claim)

    def _send(self, frame: Frame) -> bool:
        """False: the process is gone."""
        assert self._channel is not None
        try:
            self._channel.send(frame)
        except ChannelClosed:
            return False
        return True

    def _enter_calls(self, batch: list[Claim]) -> None:
        """A frame has one batch, or calls of one job each."""
        ids = [claim.job_id for claim in batch]
        calls = [frozenset(ids)] * len(ids) if self.spec.batch else [frozenset((job_id,)) for job_id in ids]
        self._busy.update(calls)
        self._calls.update(zip(ids, calls, strict=True))
        if len(self._sent) > MOST_SENT + 2 * len(self.held):
            self._sent = {job_id: fence for job_id, fence in self._sent.items() if job_id in self.held}
        self._sent |= {claim.job_id: claim.fence for claim in batch}

    def lose(self, job_id: str, reason: str = "lost") -> None:
        self._reasons[job_id] = WHY.get(reason, WHY["lost"])
        super().lose(job_id, reason)
        self._reasons.pop(job_id, None)

    def abort(self, job_id: str) -> None:
        """Its call is cancelled, a batch's once nobody wants any of it."""
        call = self._calls.get(job_id)
        if call is None or call in self._unwanted:
            return
        why = self._reasons.get(job_id, HANDED_BACK)
        self.log.write("stoker", f"the call of job {job_id} {why}", job_id)
        if not call & self.held.keys() - {job_id}:
            self._send({"t": "cancel", "id": job_id})
            self._look_later(call, f"the call of job {job_id} {why}")

    def _look_later(self, call: frozenset[str], what: str) -> None:
        self._unwanted[call] = asyncio.get_running_loop().call_later(ABORT_GRACE_S, self._on_overdue, call, what)

    def _on_overdue(self, call: frozenset[str], what: str) -> None:
        self._overdue[call] = what
        self._end_if_alone()
        if not self._ending:
            self._look_later(call, what)

    def _end_if_alone(self) -> None:
        """User code that doesn't end can only be killed, with its process; whoever else works there may finish."""
        if not self._overdue or self._busy != self._overdue.keys() or not self._calls.keys() >= self.held.keys():
            return
        if self._process and self._process.returncode is None:
            what = f"{next(iter(self._overdue.values()))} and had not ended {ABORT_GRACE_S:g} s later"
            self._end(self._process, Ending(f"{what}, so its process was ended", fault=False))

    def _end(self, process: Forked, ending: Ending) -> None:
        """What that means for its jobs is known when it is gone: it may still have sent results."""
        self._ending = self._ending or ending
        self._close()
        send_signal(process, signal.SIGKILL, group=True)

    def _close(self) -> None:
        """Nothing more is sent to the process. What was not goes back as it came, and so does what still comes."""
        if not self.held and self._stopping.is_set():
            return
        self._closed = True
        for claim in [claim for claim in self.held.values() if not self.begun(claim.job_id)]:
            self._give_back(claim)
        self._stopping.set()
        self._room.set()
        self.claimer.nudge()

    async def _watch(self, process: Forked, channel: AsyncChannel) -> None:
        """Its exit counts, not the end of its channel: what user code forked may hold that open."""
        await process.wait()
        send_signal(process, signal.SIGKILL, group=True)
        await channel.close()

    async def _read(self, process: Forked, channel: AsyncChannel) -> None:
        try:
            while True:
                for frame in together(await channel.frames()):
                    self._on_frame(frame)
        except ChannelClosed:
            self._close()
        except Exception as error:
            self._end(process, Ending(f"its process sent what can't be read: {type(error).__name__}: {error}"))
        await self._on_gone(process)

    def _on_frame(self, frame: Frame) -> None:
        match frame["t"]:
            case "step":
                self._step = STEPS.get(frame["name"], self._step)
            case "ready" if not self._ready.done():
                self._ready.set_result(frame)
            case "load_error" if not self._ready.done():
                self._output.drain()
                self._ready.set_exception(StartFailed(frame["error"]))
            case "chunk":
                self._on_chunk(frame["id"], frame["value"])
            case "results":
                self._on_results(frame["items"])

    def _on_chunk(self, job_id: str, value: Any) -> None:
        claim = self.held.get(job_id)
        if claim and claim.stream and self._calls.get(job_id) not in self._unwanted:
            self.outbox.emit(job_id, claim.fence, pack({"value": value}))

    def _on_results(self, items: list[list[Any]]) -> None:
        self._output.drain()
        unwanted = self._leave_calls([item[0] for item in items])
        for job_id, succeeded, value in items:
            claim = self.held.get(job_id)
            if claim is None:
                continue
            if job_id in unwanted:
                self._send_batch([claim])
            elif succeeded:
                self.complete(claim, {"value": value}, {})
            elif not self.aside.misfits(claim, unpack(claim.payload), value):
                self.fail(claim, value, retry=False)
        self._end_if_alone()
        self._room.set()

    def _leave_calls(self, job_ids: list[str]) -> frozenset[str]:
        """These jobs' calls have ended, each with all of its jobs; those whose result nobody wants."""
        ended = {self._calls[job_id] for job_id in job_ids if job_id in self._calls}
        self._busy -= ended
        for job_id in jobs_of(ended):
            del self._calls[job_id]
        unwanted = ended & self._unwanted.keys()
        for call in unwanted:
            self._unwanted.pop(call).cancel()
            self._overdue.pop(call, None)
        return jobs_of(unwanted)

    async def _on_gone(self, process: Forked) -> None:
        code = await process.wait()
        self._output.drain()
        ending = self._ending or Ending(f"its process ended with {describe_exit(code)}")
        if ending.fault and (self._ending or not self._dismissed):
            self.log.say(ending.how)
        error = ending.record(short_name(self.spec.name))
        if not self._ready.done():
            self._ready.set_exception(StartFailed(error))
        elif self._closed or self.held:
            self.crash(error)


def together(frames: Iterable[Frame]) -> Iterator[Frame]:
    """Results that came at once as one frame; everything else as it is, also what makes no sense."""
    items: list[Any] = []
    for frame in frames:
        if isinstance(frame, dict) and frame.get("t") == "results" and isinstance(frame.get("items"), list):
            items += frame["items"]
            continue
        if items:
            yield {"t": "results", "items": items}
            items = []
        yield frame
    if items:
        yield {"t": "results", "items": items}


def phases_of(ready: Frame) -> list[Record]:
    """What a process says of its start: it is on the records of its jobs, so it has a size. Raises for what is none."""
    return [
        {"name": phase["name"][:MOST_NAME], "start_ns": int(phase["start_ns"]), "end_ns": int(phase["end_ns"])}
        for phase in ready["phases"][:MOST_PHASES]
    ]


def start_frame(spec: FunctionSpec, place: Workplace, variables: Mapping[str, str]) -> Frame:
    """A limit on memory would keep CUDA from starting, so functions with a GPU are only watched."""
    return {
        "t": "start",
        "folder": str(place.code),
        "entry": spec.entry,
        "batched": spec.batch is not None,
        "concurrency": spec.concurrency,
        "env": {**place.environment(), **spec.env, **variables},
        "uid": place.uid,
        "memory_mb": 0 if spec.gpu else spec.memory_mb,
    }
