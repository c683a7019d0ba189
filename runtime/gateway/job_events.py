"""A job's events for clients that read them as they are: generators' values, raw text pieces, progress of the job."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any

from stoker.queue.events import Event
from stoker.queue.records import unpack
from stoker.runtime.gateway import sse
from stoker.runtime.gateway.following import Following
from stoker.runtime.gateway.job_object import JobObject, shown_result
from stoker.runtime.gateway.large import LARGE, aside, json_by_pieces
from stoker.runtime.gateway.letting_go import GatewayStops
from stoker.runtime.gateway.outcome import Outcome

LAST = "end"

Show = Callable[[Any], Any]


async def job_frames(following: Following, job: JobObject, show: Show) -> AsyncGenerator[bytes, None]:
    """First the job's record as a `state` event, then what `event_frames` says. It breaks off when the gateway stops:
    a client goes on behind its last id."""
    yield sse.event(show(job), name="state")
    with suppress(GatewayStops):
        async with aclosing(event_frames(following, show)) as frames:
            async for frame in frames:
                yield frame


async def event_frames(following: Following, show: Show) -> AsyncGenerator[bytes, None]:
    """Values as plain messages, `retry` where a new attempt begins from the start, `end` with the result. `show` makes
    JSON of a function's own values.

    A job that fails raises the ApiError that says so, which a stream sends as its last event, `error`.
    """
    async with following:
        async for event in following:
            if event.kind == "end":
                outcome = await following.outcome_at(event)
                yield await aside(outcome.size, end_frame, outcome, show)
            else:
                yield event_frame(event, show)


def event_frame(event: Event, show: Show) -> bytes:
    if event.kind == "retry":
        return sse.event({"attempt": event.attempt + 1}, name="retry", id=event.id)
    return sse.event(shown_chunk(unpack(event.data), show), id=event.id)


def shown_chunk(chunk: dict[str, Any], show: Show) -> Any:
    """A generator's own value, or a piece of text with its token ids."""
    return show(chunk["value"]) if chunk.keys() == {"value"} else chunk


def end_frame(outcome: Outcome, show: Show) -> bytes:
    result = show(shown_result(outcome.value(), raw=True))
    data = {"state": outcome.state, "result": result, "usage": outcome.usage}
    line = sse.json_bytes(data) if outcome.size < LARGE else json_by_pieces(data)
    return sse.framed(line, name="end", id=LAST)
