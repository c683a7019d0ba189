"""Answers of a function process: each call has one, or the process ends."""

import multiprocessing
import os
import socket
from collections.abc import Iterator

import pytest

from stoker.runtime.wire import Channel, Frame, FrameTooBig, encode
from stoker.runtime.worker.function_process import NO_ANSWER, Answers, calls_of
from stoker.runtime.worker.interrupt import Interrupt, Interrupts
from stoker.runtime.worker.user_code import Emit, Item, UserCode

Ends = tuple[Channel, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    channels = Channel(ours), Channel(theirs)
    yield channels
    for channel in channels:
        channel.close()


def test_what_can_not_be_sent_is_told_and_its_neighbours_are_sent(ends: Ends) -> None:
    worker, process = ends
    answers = Answers(process)
    answers.put([["a", True, 1], ["b", True, object()], ["c", True, "\ud800"]])
    answers.put([["d", True, 2]])
    told = {item[0]: item[1:] for _ in range(4) for item in worker.receive()["items"]}
    assert told["a"] == [True, 1] and told["d"] == [True, 2]
    for job_id, code in (("b", "TypeError"), ("c", "UnicodeEncodeError")):
        succeeded, error = told[job_id]
        assert not succeeded and error["code"] == code and error["message"].startswith("the result can't be sent")


class Narrow(Channel):
    def send(self, frame: Frame) -> None:
        if len(encode(frame)) > 10_000:
            raise FrameTooBig("too big")
        super().send(frame)


def test_results_that_are_too_big_together_are_sent_one_by_one(ends: Ends) -> None:
    worker, process = ends
    answers = Answers(Narrow(process._sock))
    answers.put([["a", True, b"x" * 6000], ["b", True, b"x" * 6000], ["c", True, b"x" * 20_000]])
    items = [worker.receive()["items"][0] for _ in range(3)]
    assert [item[1] for item in items] == [True, True, False] and items[2][2]["code"] == "FrameTooBig"


class Broken(UserCode):
    """Fails where nothing should."""

    def single(self, item: Item, emit: Emit, interrupt: Interrupt | None = None) -> Item:
        raise MemoryError

    def batch(self, items: list[Item], interrupt: Interrupt | None = None) -> list[Item]:
        raise MemoryError


@pytest.mark.parametrize("batched", [True, False])
def test_every_job_of_a_call_that_breaks_is_answered(ends: Ends, batched: bool) -> None:
    worker, process = ends
    frame = {"batched": batched, "items": [["a", 1], ["b", 2]]}
    for call in calls_of(Broken(len), Answers(process), Interrupts(), frame):
        call()
    frames = [worker.receive() for _ in range(1 if batched else 2)]
    told = {item[0]: item[2]["code"] for frame in frames for item in frame["items"]}
    assert told == {"a": "MemoryError", "b": "MemoryError"}


def answer_into_nothing() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    frame = {"batched": False, "items": [["a", "x"]]}
    for call in calls_of(UserCode(lambda text: text), Answers(Channel(theirs)), Interrupts(), frame):
        call()
    os._exit(0)


def test_a_process_that_can_not_answer_ends() -> None:
    process = multiprocessing.get_context("spawn").Process(target=answer_into_nothing)
    process.start()
    process.join(30)
    assert process.exitcode == NO_ANSWER
