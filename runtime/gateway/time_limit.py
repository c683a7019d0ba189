"""A limit on how long Python code of others may run in a thread of ours, such as a loop in a model's chat template."""

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOOK_S = 0.1


class TimeUp(BaseException):
    """No Exception, so that code which catches those can't go on."""


class Watch:
    """One thread looks after all blocks that run, and sleeps while there is none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[object, tuple[int, float]] = {}
        self._work = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Raises TimeUp in a block that runs for longer. A single call into C is interrupted only when it returns."""
        block = object()
        with self._lock:
            self._running[block] = (threading.get_ident(), time.monotonic() + seconds)
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="time limit", daemon=True)
                self._thread.start()
        self._work.set()
        try:
            yield
        finally:
            self._leave(block)

    def _leave(self, block: object) -> None:
        """Behind this the block can't be interrupted any more."""
        with self._lock:
            self._running.pop(block, None)

    def _look(self) -> None:
        while True:
            self._work.wait()
            time.sleep(LOOK_S)
            with self._lock:
                now = time.monotonic()
                for block, (thread, until) in list(self._running.items()):
                    if now > until:
                        del self._running[block]
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeUp))
                if not self._running:
                    self._work.clear()


WATCH = Watch()
