"""The order of events for one reader, whatever is lost, repeated or read in between."""

from dataclasses import dataclass, field

import msgpack
from hypothesis import given
from hypothesis import strategies as st

from stoker.queue.feed import Ending, Event, Feed, Frame
from stoker.queue.records import JobState
from stoker.queue.replies import Entry, View

JOB = "f-01M8P9NXY7T1PMWEYN7D70NQY6"


@dataclass
class Stream:
    """What the scripts would publish and keep for one job, attempt by attempt."""

    entries: list[Entry] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    history: list[View] = field(default_factory=list)
    fence: int = 10
    attempt: int = 1
    past: int = 0

    def last(self) -> str:
        return self.entries[-1].id if self.entries else "0"

    def chunk(self, data: bytes) -> None:
        entry = Entry(f"7-{len(self.entries) + 1}", self.fence, self.attempt, data)
        self._publish(b"chunk", entry, data)
        self.entries.append(entry)
        self._remember(JobState.RUNNING)

    def retry(self) -> None:
        kept = bool(self.entries)
        entry = Entry(f"7-{len(self.entries) + 1}" if kept else "", self.fence, self.attempt, None)
        self._publish(b"retry", entry)
        if kept:
            self.entries.append(entry)
        self.past = self.fence
        self._remember(JobState.RETRYING)
        self.fence += 1
        self.attempt += 1
        self._remember(JobState.RUNNING)

    def end(self) -> None:
        packed = msgpack.packb([b"result", False, b"usage", False])
        self.frames.append(
            [b"end", JOB.encode(), self.last().encode(), self.attempt, b"succeeded", b"", packed],
        )
        self._remember(JobState.SUCCEEDED)

    def _publish(self, kind: bytes, entry: Entry, *data: bytes) -> None:
        numbers = [str(entry.fence).encode(), str(entry.attempt).encode()]
        self.frames.append([kind, JOB.encode(), entry.id.encode(), self.last().encode(), *numbers, *data])

    def _remember(self, state: JobState) -> None:
        outcome = (b"result", None, b"usage", None) if state.terminal else None
        self.history.append(View(state, self.attempt, self.past, "", outcome, list(self.entries)))

    def view(self, moment: int, after: str, most: int) -> View:
        """The record at that moment, with up to `most` entries behind `after`."""
        view = self.history[moment]
        start = 0 if after == "0-0" else next(i for i, entry in enumerate(self.entries) if entry.id == after) + 1
        entries = view.entries[start : start + most]
        whole = len(entries) < most
        return View(view.state, view.attempt, view.past, view.reason, view.outcome, entries, whole)


def script(*words: str) -> Stream:
    stream = Stream()
    for word in words:
        if word == "retry":
            stream.retry()
        elif word == "end":
            stream.end()
        else:
            stream.chunk(word.encode())
    return stream


def words(events: list[Event]) -> list[str]:
    return [event.data.decode() if event.kind == "chunk" else event.kind for event in events]


def play(feed: Feed, frames: list[Frame]) -> list[Event]:
    return [event for frame in frames for event in feed.live(frame) or []]


def test_live_frames_become_events() -> None:
    events = play(Feed(JOB), script("a", "b", "retry", "c", "end").frames)
    assert words(events) == ["a", "b", "retry", "c", "end"]
    assert [event.attempt for event in events] == [1, 1, 1, 2, 2]
    assert [event.id for event in events] == ["7-1", "7-2", "7-3", "7-4", ""]
    assert events[-1].ending == Ending(result=b"result", error=None, usage=b"usage", notes=None, reason="")
    assert events[-1].state is JobState.SUCCEEDED


def test_repeated_frames_are_dropped() -> None:
    frames = script("a", "retry", "b", "end").frames
    assert words(play(Feed(JOB), [frame for frame in frames for _ in range(3)] + frames)) == ["a", "retry", "b", "end"]


def test_a_gap_asks_for_the_stream() -> None:
    stream = script("a", "b", "c", "end")
    feed = Feed(JOB)
    assert feed.live(stream.frames[1]) is None
    assert feed.live(stream.frames[3]) is None
    assert words(feed.missed(stream.view(1, feed.position, 100))) == ["a", "b"]
    assert words(play(feed, stream.frames)) == ["c", "end"]


def test_resume_skips_what_was_seen() -> None:
    stream = script("a", "retry", "b", "end")
    assert words(play(Feed(JOB, "7-2"), stream.frames)) == ["b", "end"]
    feed = Feed(JOB, "7-2")
    assert words(feed.missed(stream.view(-1, feed.position, 100))) == ["b", "end"]


def test_an_attempt_that_ended_before_any_output_is_still_announced() -> None:
    stream = script("retry", "retry", "a")
    assert words(play(Feed(JOB), stream.frames)) == ["retry", "retry", "a"]
    feed = Feed(JOB)
    assert words(feed.missed(stream.view(1, "0-0", 100))) == ["retry"]
    assert words(feed.missed(stream.view(1, "0-0", 100))) == []


def test_a_page_that_is_full_is_not_the_end() -> None:
    stream = script("a", "b", "c", "end")
    feed = Feed(JOB)
    assert words(feed.missed(stream.view(-1, "0-0", 2))) == ["a", "b"]
    assert words(feed.missed(stream.view(-1, feed.position, 2))) == ["c", "end"]


def test_a_large_outcome_is_left_to_the_reader() -> None:
    frame = [b"end", JOB.encode(), b"0", 1, b"succeeded", b"", False]
    (event,) = play(Feed(JOB), [frame])
    assert (event.kind, event.ending, event.state) == ("end", None, JobState.SUCCEEDED)


def test_a_record_that_is_gone_ends_the_feed() -> None:
    feed = Feed(JOB)
    assert feed.missed(None) == []
    assert feed.live([b"read", JOB.encode()]) is None
    (event,) = feed.missed(None)
    assert (event.kind, event.state, event.ending) == ("end", None, None)


@given(
    st.lists(st.sampled_from(["chunk", "chunk", "retry"]), max_size=12),
    st.lists(st.tuples(st.sampled_from(["frame", "skip", "again", "view"]), st.integers(0, 30)), max_size=40),
    st.integers(1, 4),
)
def test_any_loss_is_made_up_for(kinds: list[str], moves: list[tuple[str, int]], page: int) -> None:
    """Frames are lost or repeated, the record is read late or early: the reader sees every chunk once and in order."""
    stream = script("first", *(f"c{i}" if kind == "chunk" else kind for i, kind in enumerate(kinds)), "end")
    feed, seen, place = Feed(JOB), [], 0
    for move, number in moves:
        if move == "frame" and place < len(stream.frames):
            seen += feed.live(stream.frames[place]) or []
        elif move == "again" and place:
            seen += feed.live(stream.frames[number % place]) or []
        elif move == "view":
            moment = min(number, place * 2, len(stream.history) - 1)
            if len(stream.history[moment].entries) >= position(stream, feed):
                seen += feed.missed(stream.view(moment, feed.position, page))
        place = min(place + (move in ("frame", "skip")), len(stream.frames))
    while not feed.over:
        seen += feed.missed(stream.view(-1, feed.position, page))
    assert words(seen) == ["first", *(f"c{i}" if kind == "chunk" else kind for i, kind in enumerate(kinds)), "end"]


def position(stream: Stream, feed: Feed) -> int:
    """How many entries the feed has passed: the server never shows it fewer."""
    return [entry.id for entry in stream.entries].index(feed.position) + 1 if feed.position != "0-0" else 0
