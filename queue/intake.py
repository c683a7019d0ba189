"""Jobs of one function that are enqueued in one turn of the event loop go to the server in few calls of the script."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from stoker.queue.records import NewJob

# So that no call holds the server up for long, and it works on the first while the others are made.
MOST_AT_ONCE = 32

# What makes bytes of a job raises these for one that has none.
UNSENDABLE = (OverflowError, TypeError, ValueError)

Send = Callable[[str, Sequence[NewJob]], Awaitable[list[Any]]]
Waiting = tuple[NewJob, "asyncio.Future[Any]"]


class Intake:
    """`send` stores jobs of one function, at once if it can, and answers the script's reply for each, later; what it
    raises, each caller gets."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: dict[str, list[Waiting]] = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def put(self, job: NewJob) -> Any:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        waiting = self._waiting.setdefault(job.function, [])
        waiting.append((job, answer))
        if len(waiting) == 1:
            loop.call_soon(self._begin, job.function, waiting)
        elif len(waiting) == MOST_AT_ONCE:
            self._begin(job.function, waiting)
        return await answer

    def _begin(self, function: str, waiting: list[Waiting]) -> None:
        """At once, not in a next turn: the server works on these jobs while those behind them are made."""
        if self._waiting.get(function) is waiting:
            del self._waiting[function]
            if wanted := [item for item in waiting if not item[1].done()]:
                self._begin_call(function, wanted)

    def _begin_call(self, function: str, waiting: list[Waiting]) -> None:
        try:
            sending = self._send(function, [job for job, _ in waiting])
        except UNSENDABLE as error:
            self._send_apart(function, waiting, error)
            return
        task = asyncio.get_running_loop().create_task(self._end_call(function, waiting, sending))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _end_call(self, function: str, waiting: list[Waiting], sending: Awaitable[list[Any]]) -> None:
        try:
            values = await sending
        except UNSENDABLE as error:
            self._send_apart(function, waiting, error)
        except Exception as error:
            fail(waiting, error)
        except asyncio.CancelledError:
            # The loop ends.
            for _, answer in waiting:
                answer.cancel()
            raise
        else:
            for (_, answer), value in zip(waiting, values, strict=True):
                if not answer.done():
                    answer.set_result(value)

    def _send_apart(self, function: str, waiting: list[Waiting], error: Exception) -> None:
        """One of them can't be sent, which is no matter of the others."""
        if len(waiting) == 1:
            fail(waiting, error)
        else:
            for each in waiting:
                self._begin_call(function, [each])


def fail(waiting: list[Waiting], error: Exception) -> None:
    for _, answer in waiting:
        if not answer.done():
            answer.set_exception(error)
