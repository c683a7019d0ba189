"""The threads of a function process that call user code."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

Call = Callable[[], None]


class CallThreads:
    """Up to `most` calls at once, each in a thread of its own while it lasts.

    One thread is woken at a time: it wakes the next before each call, in case that one blocks, and goes on with what
    waits. So calls that take no time are made by one thread, and don't cost a switch each. While one that was woken has
    not looked yet, nobody else need be.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: deque[Call] = deque()
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._begun = 0
        self._ended = 0
        self._closed = False
        self._rung = False
        self._counting = threading.Lock()

    def submit(self, calls: Sequence[Call]) -> None:
        """From one thread."""
        self._begun += len(calls)
        self._waiting.extend(calls)
        while len(self._threads) < min(self._most, self._begun - self._ended):
            thread = threading.Thread(target=self._run, name=f"call_{len(self._threads)}")
            self._threads.append(thread)
            thread.start()
        self._ring()

    def close(self) -> None:
        """Waits for the calls that run or wait."""
        self._closed = True
        self._bell.put(None)
        for thread in self._threads:
            thread.join()

    def _ring(self) -> None:
        if not self._rung:
            self._rung = True
            self._bell.put(None)

    def _run(self) -> None:
        while not self._closed:
            self._bell.get()
            self._rung = False
            self._work()
        self._work()
        self._bell.put(None)

    def _work(self) -> None:
        while self._waiting:
            try:
                call = self._waiting.popleft()
            except IndexError:
                return
            if self._waiting:
                self._ring()
            call()
            with self._counting:
                self._ended += 1
