"""A call of user code that nobody waits for any more: how it is told."""

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


class Interrupted(BaseException):
    """A generator is asked for no more values. Raised outside of user code, which sees that its generator is closed."""


class Interrupt:
    """One call's. Set from one thread while the call runs in another, at most once with effect."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._set = False
        self._act: Callable[[], object] | None = None

    def set(self) -> None:
        with self._turn:
            already, self._set, act = self._set, True, self._act
        if act and not already:
            act()

    def check(self) -> None:
        """Raises Interrupted once it is set."""
        if self._set:
            raise Interrupted

    @contextmanager
    def cancels(self, task: asyncio.Task[object] | None) -> Iterator[None]:
        """Meanwhile, and also when it was set before, the task of the caller's loop is cancelled."""
        assert task is not None
        loop = asyncio.get_running_loop()
        with self._turn:
            self._act = lambda: loop.call_soon_threadsafe(task.cancel)
            already = self._set
        if already:
            task.cancel()
        try:
            yield
        finally:
            with self._turn:
                self._act = None


class Interrupts:
    """Those of the calls in a process, by job; a batch's jobs share one."""

    def __init__(self) -> None:
        self._by_job: dict[str, Interrupt] = {}

    def open(self, job_ids: Iterable[str]) -> Interrupt:
        """Pair with `close`."""
        interrupt = Interrupt()
        self._by_job |= dict.fromkeys(job_ids, interrupt)
        return interrupt

    def close(self, job_ids: Iterable[str], interrupt: Interrupt) -> None:
        for job_id in job_ids:
            if self._by_job.get(job_id) is interrupt:
                del self._by_job[job_id]

    def only_call(self) -> str:
        """A job of the only call there is, "" while there is none or several."""
        calls = list(self._by_job.items())
        return calls[0][0] if len({id(interrupt) for _, interrupt in calls}) == 1 else ""

    def set(self, job_id: str) -> None:
        if interrupt := self._by_job.get(job_id):
            interrupt.set()
