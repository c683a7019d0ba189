"""The order of one job's events for one reader: no duplicates, no gaps. Pure: frames and views in, events out."""

from typing import Any, Literal, NamedTuple

from stoker.queue.records import JobState
from stoker.queue.replies import Entry, Outcome, View, outcome

Frame = list[Any]
StreamId = tuple[int, int]

START: StreamId = (0, 0)


class Ending(NamedTuple):
    """What the worker packed, and why a job ended that no worker settled."""

    result: bytes | None
    error: bytes | None
    usage: bytes | None
    notes: bytes | None
    reason: str


class Event(NamedTuple):
    """`id` is the stream id, "" for what is not kept. `attempt`: of a chunk, its own; of a "retry", the one that ended.

    An "end" without `ending` has a result that is too large: then read the job. One without a state means that the
    job's record is gone.
    """

    job_id: str
    kind: Literal["chunk", "retry", "end"]
    id: str
    attempt: int
    data: bytes
    state: JobState | None
    ending: Ending | None = None


class Feed:
    """Follows one job from the stream id `after`; raises ValueError when that is none."""

    def __init__(self, job_id: str, after: str = "0") -> None:
        self.job_id = job_id
        self.over = False
        parse(after)
        self._last_id = after.encode()
        self._ended_fence = 0
        self._must_exist = False

    @property
    def position(self) -> str:
        return "{}-{}".format(*self._last)

    @property
    def _last(self) -> StreamId:
        return parse(self._last_id)

    def live(self, frame: Frame) -> list[Event] | None:
        """The events of a published frame, or None: something before it is missing, or it asks to read the stream."""
        kind = frame[0]
        if kind == b"chunk" and frame[3] == self._last_id and frame[2] and not self.over:
            # The next chunk of a kept stream, as nearly always.
            _, _, self._last_id, _, _, attempt, data = frame
            return [Event(self.job_id, "chunk", self._last_id.decode(), int(attempt), data, None)]
        if kind == b"read":
            self._must_exist = True
            return None
        if self.over:
            return []
        return self._end_frame(frame) if kind == b"end" else self._entry_frame(frame)

    def missed(self, view: View | None) -> list[Event]:
        """The events that a view of the record adds."""
        if self.over:
            return []
        if view is None:
            return self._end(0, None, None) if self._must_exist else []
        self._must_exist = True
        events = self._unkept_boundary(view)
        for entry in view.entries:
            events += self._entry(entry)
        if view.state.terminal and view.whole:
            events += self._end(view.attempt, ending(view.outcome, view.reason), view.state)
        return events

    def _entry_frame(self, frame: Frame) -> list[Event] | None:
        kind, _, entry_id, previous, fence, attempt, *data = frame
        if parse(previous) > self._last:
            return None
        entry = Entry(entry_id.decode(), int(fence), int(attempt), data[0] if kind == b"chunk" else None)
        return self._entry(entry)

    def _end_frame(self, frame: Frame) -> list[Event] | None:
        _, _, last, attempt, state, reason, packed = frame
        if last != self._last_id and parse(last) > self._last:
            return None
        parts = None if packed is False else outcome(packed)
        return self._end(int(attempt), ending(parts, reason.decode()), JobState(state.decode()))

    def _entry(self, entry: Entry) -> list[Event]:
        if entry.id:
            if parse(entry.id) <= self._last:
                return []
            self._last_id = entry.id.encode()
        if entry.data is None:
            return self._boundary(entry.fence, entry.attempt, entry.id)
        return [Event(self.job_id, "chunk", entry.id, entry.attempt, entry.data, None)]

    def _boundary(self, fence: int, attempt: int, entry_id: str) -> list[Event]:
        if fence <= self._ended_fence:
            return []
        self._ended_fence = fence
        return [Event(self.job_id, "retry", entry_id, attempt, b"", JobState.RETRYING)]

    def _unkept_boundary(self, view: View) -> list[Event]:
        """An attempt that ended before anything was kept left no mark in the stream."""
        if self._last != START or view.entries:
            return []
        return self._boundary(view.past, max(view.attempt - (view.state is JobState.RUNNING), 0), "")

    def _end(self, attempt: int, ending: Ending | None, state: JobState | None) -> list[Event]:
        self.over = True
        return [Event(self.job_id, "end", "", attempt, b"", state, ending)]


def parse(stream_id: str | bytes) -> StreamId:
    text = stream_id.decode() if isinstance(stream_id, bytes) else stream_id
    milliseconds, _, sequence = text.partition("-")
    return int(milliseconds), int(sequence or 0)


def ending(parts: Outcome | None, reason: str) -> Ending | None:
    return None if parts is None else Ending(*parts, reason)
