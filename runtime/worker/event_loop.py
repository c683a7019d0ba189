"""The event loop of a function process: coroutines of all calls run on it, so that what one of them opens (a client, a
lock) serves the next."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from stoker.runtime.worker.interrupt import Interrupt


class EventLoop:
    """A thread that runs one loop; it is started by the first coroutine."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()

    def result(self, awaitable: Awaitable[Any], interrupt: Interrupt | None = None) -> Any:
        """Waits for it, from another thread, until its task has ended, also when that is cancelled by `interrupt`.
        Raises what it raises."""
        waiting = awaited(awaitable, interrupt or Interrupt())
        return asyncio.run_coroutine_threadsafe(waiting, self._running()).result()

    def exhaust(
        self, values: AsyncGenerator[Any, Any], take: Callable[[Any], Any], interrupt: Interrupt | None = None
    ) -> list[Any]:
        """`take` of each value, in one task: what the generator holds open (a timeout) belongs to it."""

        async def taken() -> list[Any]:
            async with aclosing(values):
                return [take(value) async for value in values]

        return self.result(taken(), interrupt)

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=run_for_ever, args=(self._loop,), name="event loop", daemon=True).start()
            return self._loop


async def awaited(awaitable: Awaitable[Any], interrupt: Interrupt) -> Any:
    with interrupt.cancels(asyncio.current_task()):
        return await awaitable


def run_for_ever(loop: asyncio.AbstractEventLoop) -> None:
    """A task that raises SystemExit ends itself, not the loop: its future has the error."""
    asyncio.set_event_loop(loop)
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            continue
