"""Coroutines without a task of their own: most of what a request waits for is there at once, and a task costs more."""

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Begun(Generic[T]):
    """A coroutine that has run up to where it first waits. `over`: it never had to; `value` is then what it returned.
    Awaiting it goes on from there. Raises at once what the coroutine raises before it waits."""

    def __init__(self, coroutine: Awaitable[T]) -> None:
        self.over = False
        self.value: T
        self._rest: Generator[Any, Any, T] = coroutine.__await__()
        self.step()

    def step(self) -> None:
        try:
            self.waits_for: asyncio.Future[Any] | None = next(self._rest)
            if self.waits_for is not None:
                self.waits_for._asyncio_future_blocking = False
        except StopIteration as end:
            self.over, self.value = True, end.value

    def __await__(self) -> Generator[Any, None, T]:
        if self.over:
            return self.value
        if self.waits_for is not None:
            # What marks a future as awaited and not just yielded.
            self.waits_for._asyncio_future_blocking = True
        yield self.waits_for
        return (yield from self._rest)

    def close(self) -> None:
        self._rest.close()


class Unbroken(Generic[T]):
    """A coroutine that goes on, in a task of its own, when the one who waits for its `result` is cancelled."""

    def __init__(self, coroutine: Awaitable[T]) -> None:
        self._coroutine = coroutine
        self.task: asyncio.Task[T] | None = None

    async def result(self) -> T:
        """Once. Raises what the coroutine raises."""
        begun = Begun(self._coroutine)
        while not begun.over:
            try:
                await told(begun.waits_for)
            except asyncio.CancelledError:
                self.task = asyncio.ensure_future(rest_of(begun))
                self.task.add_done_callback(lambda task: task.cancelled() or task.exception())
                raise
            begun.step()
        return begun.value


async def told(future: asyncio.Future[Any] | None) -> None:
    """When it is done; a cancellation leaves it as it is, to be awaited. None is a turn of the event loop."""
    if future is None:
        await asyncio.sleep(0)
        return
    told: asyncio.Future[None] = future.get_loop().create_future()
    future.add_done_callback(lambda _: told.done() or told.set_result(None))
    await told


async def rest_of(begun: Begun[T]) -> T:
    return await begun


class Watch(Generic[T]):
    """Calls `ask` again and again until an answer satisfies `is_last`, then `tell`, once. Only for coroutines that wait
    for plain futures, like an ASGI server's `receive`."""

    def __init__(self, ask: Callable[[], Awaitable[T]], is_last: Callable[[T], bool], tell: Callable[[], None]) -> None:
        self._ask = ask
        self._is_last = is_last
        self._tell = tell
        self._waiting: Begun[T] | None = None
        self._go_on(Begun(ask()))

    def close(self) -> None:
        if self._waiting is not None:
            assert self._waiting.waits_for is not None
            self._waiting.waits_for.remove_done_callback(self._on_arrival)
            self._waiting.close()
            self._waiting = None

    def _go_on(self, begun: Begun[T]) -> None:
        self._waiting = None
        while begun.over:
            if self._is_last(begun.value):
                self._tell()
                return
            begun = Begun(self._ask())
        self._waiting = begun
        assert begun.waits_for is not None
        begun.waits_for.add_done_callback(self._on_arrival)

    def _on_arrival(self, _: asyncio.Future[Any]) -> None:
        # Closed since it arrived: then nobody asks any more.
        if self._waiting is not None:
            self._waiting.step()
            self._go_on(self._waiting)
