"""Simulated replicas: slots for jobs of a known length, or a continuous batch whose steps slow down as it grows."""

import heapq
from typing import Protocol

from stoker.runtime.simulator.measured import Engine
from stoker.runtime.simulator.traces import Request


class Replica(Protocol):
    """`jobs` maps a running job's number to nothing in particular; times are seconds since the start."""

    room: int
    jobs: dict[int, Request]

    def admit(self, now: float, job: int, request: Request) -> float:
        """Starts a job; returns the seconds from now to its first token."""
        ...

    def next_end(self) -> float:
        """When the next job ends if none is admitted before; infinite without any."""
        ...

    def take_ended(self, now: float) -> list[int]:
        """The jobs that have ended by now."""
        ...


class Slots:
    """`room` jobs at once, each for its own `service_s`; the first output is the start."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.jobs: dict[int, Request] = {}
        self._ends: list[tuple[float, int]] = []

    def admit(self, now: float, job: int, request: Request) -> float:
        self.jobs[job] = request
        heapq.heappush(self._ends, (now + request.service_s, job))
        return 0.0

    def next_end(self) -> float:
        return self._ends[0][0] if self._ends else float("inf")

    def take_ended(self, now: float) -> list[int]:
        ended = []
        while self._ends and self._ends[0][0] <= now:
            ended.append(heapq.heappop(self._ends)[1])
            del self.jobs[ended[-1]]
        return ended


class Batch:
    """Every running sequence gets a token each step, so one clock that counts steps is enough: a sequence ends when
    the clock reaches its start plus its length. Prefills stop the clock."""

    def __init__(self, room: int, engine: Engine) -> None:
        self.room = room
        self.jobs: dict[int, Request] = {}
        self._engine = engine
        self._steps = [engine.step_s(size) for size in range(room + 1)]
        self._ends: list[tuple[float, int]] = []
        self._clock = 0.0
        self._at = 0.0
        self._prefill_s = 0.0

    def admit(self, now: float, job: int, request: Request) -> float:
        self._advance(now)
        self.jobs[job] = request
        self._prefill_s += request.prompt_tokens / self._engine.prefill_per_s
        heapq.heappush(self._ends, (self._clock + request.output_tokens, job))
        return self._prefill_s + self._steps[len(self.jobs)]

    def next_end(self) -> float:
        if not self._ends:
            return float("inf")
        return self._at + self._prefill_s + (self._ends[0][0] - self._clock) * self._steps[len(self.jobs)]

    def take_ended(self, now: float) -> list[int]:
        self._advance(now)
        ended = []
        while self._ends and self._ends[0][0] <= self._clock + 1e-6:
            ended.append(heapq.heappop(self._ends)[1])
            del self.jobs[ended[-1]]
        return ended

    def _advance(self, now: float) -> None:
        passed = now - self._at
        self._at = now
        if self._prefill_s >= passed:
            self._prefill_s -= passed
            return
        if self.jobs:
            self._clock += (passed - self._prefill_s) / self._steps[len(self.jobs)]
        self._prefill_s = 0.0
