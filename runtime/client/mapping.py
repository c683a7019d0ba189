"""Many inputs of one function under way at once: a bounded number of them, with results in order or as they end."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from stoker.runtime.client.errors import is_about_input

CONCURRENCY = 64
HELD = 8


class Mapping:
    """Results that wait for an earlier one are held up to HELD times `concurrency`; then no more inputs are taken.

    `run(place, value)` gives the result of the input that came as number `place`; `give_up(places)` is told of those
    that are not wanted any more.
    """

    def __init__(
        self,
        run: Callable[[int, Any], Awaitable[Any]],
        give_up: Callable[[list[int]], Awaitable[None]],
        concurrency: int,
        return_exceptions: bool,
        ordered: bool,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {concurrency}")
        self._run = run
        self._give_up = give_up
        self._concurrency = concurrency
        self._return_exceptions = return_exceptions
        self._ordered = ordered
        self._running: dict[int, asyncio.Task[Any]] = {}
        self._ended: dict[int, asyncio.Task[Any]] = {}
        self._change = asyncio.Event()
        self._added = 0
        self._delivered = 0

    @property
    def busy(self) -> bool:
        return self._delivered < self._added

    @property
    def full(self) -> bool:
        return len(self._running) >= self._concurrency or len(self._ended) >= HELD * self._concurrency

    async def add(self, value: Any) -> list[Any]:
        """Only when not `full`. The results that can be delivered by now."""
        place, self._added = self._added, self._added + 1
        task = asyncio.ensure_future(self._run(place, value))
        self._running[place] = task
        task.add_done_callback(lambda _: self._on_end(place))
        return self._take()

    async def ended(self) -> list[Any]:
        """Waits until another input has ended; the results that can be delivered then. Only when `busy`."""
        if not self._ready():
            self._change.clear()
            await self._change.wait()
        return self._take()

    def _take(self) -> list[Any]:
        """Raises what the next of them raised."""
        results = []
        for place in self._ready():
            task = self._ended[place]
            error = task.exception()
            if error and not (self._return_exceptions and is_about_input(error)):
                if results:
                    break
                raise error
            results.append(error or task.result())
            del self._ended[place]
            self._delivered += 1
        return results

    async def close(self) -> None:
        """What still runs is given up."""
        places, tasks = list(self._running), list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Looked at, or asyncio would complain of exceptions that nobody took.
        await asyncio.gather(*self._ended.values(), return_exceptions=True)
        if places:
            await self._give_up(places)

    def _ready(self) -> list[int]:
        if not self._ordered:
            return list(self._ended)
        stop = self._delivered
        while stop in self._ended:
            stop += 1
        return list(range(self._delivered, stop))

    def _on_end(self, place: int) -> None:
        self._ended[place] = self._running.pop(place)
        self._change.set()
