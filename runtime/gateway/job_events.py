"""A job's events for clients that read them as they are: generators' values, raw text pieces, progress of the job."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from stoker.queue.events import Event
from stoker.queue.records import unpack
from stoker.runtime.gateway import sse
from stoker.runtime.gateway.following import Following
from stoker.runtime.gateway.job_object import JobObject, shown_result
from stoker.runtime.gateway.outcome import Outcome

LAST = "end"


async def job_frames(following: Following, job: JobObject) -> AsyncGenerator[bytes, None]:
    """First the job's record as a `state` event, then what `event_frames` says."""
    yield sse.event(job, name="state")
    async with aclosing(event_frames(following)) as frames:
        async for frame in frames:
            yield frame


async def event_frames(following: Following) -> AsyncGenerator[bytes, None]:
    """Values as plain messages, `retry` where a new attempt begins from the start, `end` with the result.

    A job that fails raises the ApiError that says so, which a stream sends as its last event, `error`.
    """
    async with following:
        async for event in following:
            if event.kind == "end":
                yield end_frame(await following.outcome_at(event))
            else:
                yield event_frame(event)


def event_frame(event: Event) -> bytes:
    if event.kind == "retry":
        return sse.event({"attempt": event.attempt + 1}, name="retry", id=event.id)
    return sse.event(shown_chunk(unpack(event.data)), id=event.id)


def shown_chunk(chunk: dict[str, Any]) -> Any:
    """A generator's own value, or a piece of text with its token ids."""
    return chunk["value"] if chunk.keys() == {"value"} else chunk


def end_frame(outcome: Outcome) -> bytes:
    body = {"state": outcome.state, "result": shown_result(outcome.value()), "usage": outcome.usage}
    return sse.event(body, name="end", id=LAST)
