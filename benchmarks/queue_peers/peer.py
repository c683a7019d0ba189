"""What the producer and the worker of every compared library share. Standard library only: it runs in each one's venv.

Both are processes that talk to the benchmark in lines: words on stdin are orders, JSON on stdout is the answer. A job
has three arguments: its number, the CLOCK_MONOTONIC nanosecond at which it was sent, a filler; it returns its number.
"""

import asyncio
import json
import os
import random
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

FILLER = "x" * 64
CONCURRENCY = 32
THREADS = 8
ENQUEUERS = 64
GAP_S = (0.02, 0.04)


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


class Ledger:
    """What a worker has run. Warm-up jobs have negative numbers and are not counted."""

    def __init__(self, on_last: Callable[[], None] | None = None) -> None:
        """`on_last` is told when the last expected job runs, and calls `finished` once that has an end."""
        self.expected = int(sys.argv[3])
        self.runs: dict[int, int] = {}
        self.waits_us: list[float] = []
        self._lock = threading.Lock()
        self._started_ns = 0
        self._cpu_s = 0.0
        self._on_last = on_last or self.finished
        threading.Thread(target=self._obey, daemon=True).start()

    def ran(self, number: int, sent_ns: int) -> int:
        now = time.monotonic_ns()
        if number < 0:
            return number
        with self._lock:
            if not self.runs:
                self._started_ns, self._cpu_s = now, time.process_time()
            self.runs[number] = self.runs.get(number, 0) + 1
            self.waits_us.append((now - sent_ns) / 1000)
            if len(self.runs) == self.expected:
                self._on_last()
        return number

    def finished(self) -> None:
        seconds = (time.monotonic_ns() - self._started_ns) / 1e9
        say(finished=True, seconds=seconds, cpu_s=time.process_time() - self._cpu_s)

    def _obey(self) -> None:
        """forget: start anew, without an end. report: executions, distinct jobs, waits."""
        for line in sys.stdin:
            with self._lock:
                if line.strip() == "forget":
                    self.expected, self.runs, self.waits_us = 0, {}, []
                    say(forgotten=True)
                else:
                    say(executions=sum(self.runs.values()), distinct=len(self.runs), waits_us=self.waits_us)
        os._exit(0)


class Producer(ABC):
    """One library's way to enqueue a job and to read its result."""

    @abstractmethod
    async def open(self, url: str) -> None: ...

    @abstractmethod
    async def enqueue(self, number: int, sent_ns: int) -> Any:
        """Returns what `result` needs."""

    @abstractmethod
    async def result(self, handle: Any) -> int | None: ...

    async def enqueue_all(self, numbers: range) -> list[Any]:
        """From ENQUEUERS tasks at once, as a busy web server would."""
        waiting = iter(numbers)
        handles = []

        async def take() -> None:
            for number in waiting:
                handle = await self.enqueue(number, time.monotonic_ns())
                handles.append((number, handle))

        await asyncio.gather(*(take() for _ in range(ENQUEUERS)))
        return handles


async def produce(producer: Producer) -> None:
    """warm N: uncounted jobs. enqueue N: timed. verify: how many results are right. pulse N: one job at a time."""
    await producer.open(sys.argv[2])
    say(ready=True)
    handles: list[Any] = []
    while line := await asyncio.to_thread(sys.stdin.readline):
        order, *words = line.split()
        if order == "warm":
            await producer.enqueue_all(range(-int(words[0]), 0))
            say(warm=True)
        elif order == "enqueue":
            started, cpu = time.perf_counter(), time.process_time()
            handles = await producer.enqueue_all(range(int(words[0])))
            say(seconds=time.perf_counter() - started, cpu_s=time.process_time() - cpu)
        elif order == "verify":
            say(readable=await verified(producer, handles))
        elif order == "pulse":
            await pulse(producer, int(words[0]))
            say(pulsed=True)


async def verified(producer: Producer, handles: list[Any]) -> int:
    """Results that the worker may still be writing get a moment."""
    deadline = time.monotonic() + 5
    right, missing = 0, handles
    while missing and time.monotonic() < deadline:
        again = []
        for number, handle in missing:
            if await producer.result(handle) == number:
                right += 1
            else:
                again.append((number, handle))
        missing = again
        await asyncio.sleep(0.05 if missing else 0)
    return right


async def pulse(producer: Producer, count: int) -> None:
    for number in range(count):
        await asyncio.sleep(random.uniform(*GAP_S))
        await producer.enqueue(number, time.monotonic_ns())
