"""Ordered, batched writes of one replica to the queue: what piles up during one round trip leaves with the next."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from stoker.queue.broker import Broker
from stoker.queue.records import Completion, Emission, Failure, Metered
from stoker.queue.retry import insist
from stoker.runtime.worker.host import PATIENCE_S

# A step of many jobs is stored in parts, so that the gateway writes the first ones while the server stores the next.
EMITTED_AT_ONCE = 32


@dataclass
class Outbox:
    """Chunks of a job always reach the queue before its end. Nothing is dropped while the server is away."""

    broker: Broker
    function: str
    on_stale: Callable[[str], None]
    _emissions: list[Emission] = field(default_factory=list)
    _completions: list[Completion] = field(default_factory=list)
    _failures: list[Failure] = field(default_factory=list)
    _metered: list[Metered] = field(default_factory=list)
    _sequence: dict[str, int] = field(default_factory=dict)
    _filled: asyncio.Event = field(default_factory=asyncio.Event)
    _empty: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._empty.set()
        self._task = asyncio.create_task(self._run())

    def emit(self, job_id: str, fence: int, data: bytes, cost: float = 0.0) -> None:
        sequence = self._sequence.get(job_id, 0) + 1
        self._sequence[job_id] = sequence
        self._emissions.append(Emission(job_id, fence, sequence, data, cost))
        self._mark()

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
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def _mark(self) -> None:
        self._empty.clear()
        self._filled.set()

    async def _run(self) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            await self._flush()
            if not self._filled.is_set():
                self._empty.set()

    async def _flush(self) -> None:
        emissions, self._emissions = self._emissions, []
        completions, self._completions = self._completions, []
        failures, self._failures = self._failures, []
        metered, self._metered = self._metered, []
        if emissions:
            await asyncio.gather(*(self._emit(part) for part in parts_of(emissions)))
        if completions:
            await insist(lambda: self.broker.done(self.function, completions), PATIENCE_S)
        if failures:
            await insist(lambda: self.broker.fail(self.function, failures), PATIENCE_S)
        if metered:
            await insist(lambda: self.broker.meter(self.function, metered), PATIENCE_S)

    async def _emit(self, emissions: list[Emission]) -> None:
        for job_id in await insist(lambda: self.broker.emit(self.function, emissions), PATIENCE_S):
            self.on_stale(job_id)


def parts_of(emissions: list[Emission]) -> list[list[Emission]]:
    """All chunks of a job are in one part, so that no part has to arrive before another."""
    by_job: dict[str, list[Emission]] = {}
    for emission in emissions:
        by_job.setdefault(emission.job_id, []).append(emission)
    parts: list[list[Emission]] = [[]]
    for chunks in by_job.values():
        if len(parts[-1]) >= EMITTED_AT_ONCE:
            parts.append([])
        parts[-1] += chunks
    return parts
