"""Ordered, batched writes of one replica to the queue: what piles up during one round trip leaves with the next."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from stoker.queue.broker import Broker
from stoker.queue.records import Completion, Emission, Failure, Metered
from stoker.queue.retry import insist
from stoker.runtime.worker.host import PATIENCE_S

# A step of many jobs leaves in parts, each as soon as it is full: the gateway writes the first ones while the server
# stores the next and the last are made.
EMITTED_AT_ONCE = 16


@dataclass(eq=False, slots=True)
class Part:
    """Chunks that leave with one call; `begun` once they have left."""

    emissions: list[Emission] = field(default_factory=list)
    begun: asyncio.Task[None] | None = None


@dataclass
class Outbox:
    """Chunks of a job always reach the queue before its end. Nothing is dropped while the server is away."""

    broker: Broker
    function: str
    on_stale: Callable[[str], None]
    _parts: list[Part] = field(default_factory=list)
    _part_of: dict[str, Part] = field(default_factory=dict)
    _may_begin: bool = False
    _completions: list[Completion] = field(default_factory=list)
    _failures: list[Failure] = field(default_factory=list)
    _metered: list[Metered] = field(default_factory=list)
    _sequence: dict[str, int] = field(default_factory=dict)
    _filled: asyncio.Event = field(default_factory=asyncio.Event)
    _empty: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._empty.set()
        self._may_begin = True
        self._task = asyncio.create_task(self._run())

    def emit(self, job_id: str, fence: int, data: bytes, cost: float = 0.0) -> None:
        # A cost alone is no chunk, and leaves no gap between those around it.
        sequence = self._sequence[job_id] = self._sequence.get(job_id, 0) + (1 if data or not cost else 0)
        part = self._part_of.get(job_id)
        if part is None or part.begun:
            if part:
                # This must not arrive before what has left.
                self._may_begin = False
            part = self._part_of[job_id] = self._part_with_room()
        part.emissions.append(Emission(job_id, fence, sequence, data, cost or ""))
        self._mark()
        if self._may_begin and len(part.emissions) == EMITTED_AT_ONCE:
            sent = self.broker.emit(self.function, part.emissions)
            part.begun = asyncio.get_running_loop().create_task(self._emit(part, sent))

    def _part_with_room(self) -> Part:
        """All unsent chunks of a job are in one part, so that no part has to arrive before another."""
        last = self._parts[-1] if self._parts else None
        if last is None or last.begun or len(last.emissions) >= EMITTED_AT_ONCE:
            last = Part()
            self._parts.append(last)
        return last

    def complete(self, completion: Completion) -> None:
        self._sequence.pop(completion.job_id, None)
        self._completions.append(completion)
        self._mark()

    def fail(self, failure: Failure) -> None:
        self._sequence.pop(failure.job_id, None)
        self._failures.append(failure)
        self._mark()

    def meter(self, metered: Metered) -> None:
        self._metered.append(metered)
        self._mark()

    def forget(self, job_id: str) -> None:
        """The job was lost: what it still had to say would be refused anyway."""
        self._sequence.pop(job_id, None)

    async def drained(self) -> None:
        await self._empty.wait()

    async def close(self) -> None:
        for part in self._parts:
            if part.begun:
                part.begun.cancel()
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def _mark(self) -> None:
        if not self._filled.is_set():
            self._empty.clear()
            self._filled.set()

    async def _run(self) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            await self._flush()
            if not self._filled.is_set():
                self._empty.set()
                self._may_begin = True

    async def _flush(self) -> None:
        parts, self._parts, self._part_of = self._parts, [], {}
        may_begin, self._may_begin = self._may_begin, False
        completions, self._completions = self._completions, []
        failures, self._failures = self._failures, []
        metered, self._metered = self._metered, []
        if not may_begin:
            await asyncio.gather(*(part.begun for part in parts if part.begun))
        await asyncio.gather(*(part.begun or self._emit(part) for part in parts))
        if completions:
            await insist(lambda: self.broker.done(self.function, completions), PATIENCE_S)
        if failures:
            await insist(lambda: self.broker.fail(self.function, failures), PATIENCE_S)
        if metered:
            await insist(lambda: self.broker.meter(self.function, metered), PATIENCE_S)

    async def _emit(self, part: Part, begun: Awaitable[list[str]] | None = None) -> None:
        call = partial(self.broker.emit, self.function, part.emissions)
        for job_id in await insist(call, PATIENCE_S, begun):
            self.on_stale(job_id)
