"""A language-model job as a stream of OpenAI's chunks. The pieces add up to the whole answer, choice by choice."""

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from stoker.queue.events import Event
from stoker.queue.records import unpack
from stoker.runtime.gateway import sse
from stoker.runtime.gateway.calls import Call
from stoker.runtime.gateway.endpoint import Incoming
from stoker.runtime.gateway.event_stream import EventStream
from stoker.runtime.gateway.metrics import TokenClock
from stoker.runtime.gateway.schema import ChatRequest, Sampling
from stoker.runtime.gateway.shapes import ChatShape, CompletionShape, Entries, Shape, choices_of


def shape_of(request: Sampling, job_id: str) -> Shape:
    told = (job_id, request.model, int(time.time()), request.include_usage)
    return ChatShape(*told, request.tool_style) if isinstance(request, ChatRequest) else CompletionShape(*told)


def token_stream(incoming: Incoming, call: Call, request: Sampling) -> Response:
    tokens = TokenFrames(incoming, call, request)
    return EventStream(incoming.gateway, call, tokens.frames(), tokens.piece)


@dataclass(slots=True)
class Told:
    """How much of a choice the client has: characters, and tokens' log-probabilities."""

    begun: bool = False
    text: int = 0
    logprobs: int = 0


class TokenFrames:
    """Every visible piece of text as a chunk. A second attempt continues the text, so `retry` events need no mark."""

    def __init__(self, incoming: Incoming, call: Call, request: Sampling) -> None:
        self._call = call
        self._request = request
        self._clock = TokenClock(incoming.gateway.metrics, call.function, incoming.started)
        self._told = [Told() for _ in range(request.choices)]
        self._split = bool(request.tool_style)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        async with self._call as call:
            self._shape = shape_of(self._request, call.job_id)
            self._plain = sse.TextEvent(self._shape.text)
            async for event in call:
                if event.kind == "chunk":
                    if piece := self.piece(event):
                        yield piece
                elif event.kind == "end":
                    result = (await call.outcome_at(event)).value()
                    yield self._ends(result)
                    if self._request.include_usage:
                        yield sse.event(self._shape.usage(result["usage"]))
            yield sse.DONE

    def piece(self, event: Event) -> bytes:
        """Of a chunk; empty when there is nothing to show."""
        chunk = unpack(event.data)
        self._clock.tick(len(chunk["ids"]))
        return self._shown(chunk.get("index", 0), chunk["text"], chunk.get("logprobs"), event.id)

    def _ends(self, result: dict[str, Any]) -> bytes:
        """Of every choice what is missing yet, and its finish reason."""
        ends = b""
        for index, choice in enumerate(choices_of(result)):
            told = self._told[index]
            entries = (choice.get("logprobs") or [])[told.logprobs :]
            ends += self._shown(index, choice["text"][told.text :], entries, "") or self._begin(index)
            ends += b"".join(map(sse.event, self._shape.rest(choice["finish_reason"], index)))
            ends += sse.event(self._shape.last(choice["finish_reason"], index))
        return ends

    def _shown(self, index: int, text: str, entries: Entries, id: str) -> bytes:
        if not text and not entries:
            return b""
        told = self._told[index]
        head = b"" if told.begun else self._begin(index)
        told.text += len(text)
        told.logprobs += len(entries or ())
        if self._split:
            return head + b"".join(sse.event(chunk, id=id) for chunk in self._shape.split(text, index, entries))
        if index == 0 and not entries:
            return head + self._plain.fill(text, id)
        return head + sse.event(self._shape.text(text, index, entries), id=id)

    def _begin(self, index: int) -> bytes:
        told = self._told[index]
        first = None if told.begun else self._shape.first(index)
        told.begun = True
        return sse.event(first) if first else b""
