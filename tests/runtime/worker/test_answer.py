from collections.abc import Sequence
from typing import Any

import pytest

from stoker.queue.records import Claim, StoredChunk, pack
from stoker.runtime.worker.answer import Answer


class Letters:
    """Token n is the letter with that code."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def claim(chunks: list[tuple[str, str]] | None = None, **params: Any) -> Claim:
    payload = {"kind": "generate", "prompt_ids": [1, 2, 3], "params": {"max_tokens": 100, "stop": [], **params}}
    return Claim(
        job_id="chat-1",
        function="chat",
        tenant="default",
        payload=pack(payload),
        fence=2,
        attempt=2 if chunks else 1,
        max_attempts=3,
        stream=True,
        gateway="",
        enqueued_ms=0,
        claimed_ms=0,
        run_within_ms=0,
        chunks=[StoredChunk(str(n), 1, 1, pack({"text": t, "ids": ids(i)})) for n, (t, i) in enumerate(chunks or [])],
    )


def test_text_and_counts_of_a_whole_answer() -> None:
    answer = Answer(claim(), Letters())
    assert answer.absorb(ids("Par"), None) + answer.absorb(ids("is"), "stop") == "Paris"
    assert answer.result() == {
        "text": "Paris",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 3, "completion_tokens": 5, "cached_tokens": 0},
    }


def test_a_stop_string_ends_the_answer_whatever_the_engine_says() -> None:
    answer = Answer(claim(stop=["END"]), Letters())
    assert answer.absorb(ids("so E"), None) == "so "
    assert answer.finish_reason is None
    assert answer.absorb(ids("ND more"), None) == ""
    assert (answer.finish_reason, answer.text) == ("stop", "so ")


def test_an_earlier_attempt_is_continued_without_repeating_its_text() -> None:
    answer = Answer(claim([("The cap", "The cap"), ("ital", "ital")]), Letters())
    assert answer.prior == ids("The capital")
    assert answer.absorb(ids(" of"), None) == " of"
    assert answer.text == "The capital of"
    assert answer.usage()["completion_tokens"] == len("The capital of")


def test_text_held_back_by_the_earlier_attempt_is_shown_by_this_one() -> None:
    answer = Answer(claim([("so ", "so E")], stop=["END"]), Letters())
    assert answer.absorb(ids("asy"), "length") == "Easy"
    assert answer.text == "so Easy"


def test_a_tail_that_the_earlier_attempt_already_flushed_is_not_shown_twice() -> None:
    answer = Answer(claim([("so ", "so E"), ("E", "")], stop=["END"]), Letters())
    assert answer.absorb([], "length") == ""
    assert answer.text == "so E"


@pytest.mark.parametrize(
    ("chunks", "params", "reason"),
    [([("abc", "abc")], {"max_tokens": 3}, "length"), ([("a", "aEND")], {"stop": ["END"]}, "stop")],
)
def test_an_attempt_that_had_already_finished_needs_no_engine(
    chunks: list[tuple[str, str]], params: dict[str, Any], reason: str
) -> None:
    assert Answer(claim(chunks, **params), Letters()).finish_reason == reason


def test_stop_strings_stay_with_the_agent() -> None:
    assert "stop" not in Answer(claim(stop=["x"], temperature=0.5), Letters()).engine_params()
