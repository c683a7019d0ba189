from collections.abc import Sequence
from typing import Any

import pytest

from stoker.queue.records import Claim, StoredChunk, pack
from stoker.runtime.worker.answer import Answer, Choice


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
        since_ms=0,
        claimed_ms=0,
        run_within_ms=0,
        chunks=[StoredChunk(str(n), 1, 1, pack({"text": t, "ids": ids(i)})) for n, (t, i) in enumerate(chunks or [])],
    )


def only(answer: Answer) -> Choice:
    [choice] = answer.choices
    return choice


def test_text_and_counts_of_a_whole_answer() -> None:
    answer = Answer(claim(), Letters())
    assert only(answer).absorb(ids("Par"), None) + only(answer).absorb(ids("is"), "stop") == "Paris"
    assert answer.result() == {
        "text": "Paris",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 3, "completion_tokens": 5, "cached_tokens": 0},
    }


def test_a_stop_string_ends_the_answer_whatever_the_engine_says() -> None:
    answer = Answer(claim(stop=["END"]), Letters())
    assert only(answer).absorb(ids("so E"), None) == "so "
    assert only(answer).finish_reason is None
    assert only(answer).absorb(ids("ND more"), None) == ""
    assert (only(answer).finish_reason, only(answer).text) == ("stop", "so ")


def test_an_earlier_attempt_is_continued_without_repeating_its_text() -> None:
    answer = Answer(claim([("The cap", "The cap"), ("ital", "ital")]), Letters())
    assert only(answer).prior == ids("The capital")
    assert only(answer).absorb(ids(" of"), None) == " of"
    assert only(answer).text == "The capital of"
    assert answer.usage()["completion_tokens"] == len("The capital of")


def test_text_held_back_by_the_earlier_attempt_is_shown_by_this_one() -> None:
    answer = Answer(claim([("so ", "so E")], stop=["END"]), Letters())
    assert only(answer).absorb(ids("asy"), "length") == "Easy"
    assert only(answer).text == "so Easy"


def test_a_tail_that_the_earlier_attempt_already_flushed_is_not_shown_twice() -> None:
    answer = Answer(claim([("so ", "so E"), ("E", "")], stop=["END"]), Letters())
    assert only(answer).absorb([], "length") == ""
    assert only(answer).text == "so E"


@pytest.mark.parametrize(
    ("chunks", "params", "reason"),
    [([("abc", "abc")], {"max_tokens": 3}, "length"), ([("a", "aEND")], {"stop": ["END"]}, "stop")],
)
def test_an_attempt_that_had_already_finished_needs_no_engine(
    chunks: list[tuple[str, str]], params: dict[str, Any], reason: str
) -> None:
    assert Answer(claim(chunks, **params), Letters()).choices[0].finish_reason == reason
    assert Answer(claim(chunks, **params), Letters()).unfinished == []


def test_stop_strings_stay_with_the_agent() -> None:
    assert "stop" not in Answer(claim(stop=["x"], temperature=0.5), Letters()).engine_params()


def entry(letter: str) -> dict[str, Any]:
    return {"token": letter, "logprob": -1.0, "bytes": ids(letter), "top_logprobs": []}


def test_logprobs_are_those_of_the_tokens_that_count() -> None:
    choice = only(answer := Answer(claim(stop=["END"]), Letters()))
    choice.absorb(ids("so EN"), None, [entry(letter) for letter in "so EN"])
    choice.absorb(ids("Dx"), None, [entry("D"), entry("x")])
    assert answer.usage()["completion_tokens"] == 6
    assert [each["token"] for each in answer.result()["logprobs"]] == list("so END")


def test_several_choices_keep_apart_and_their_seeds_follow_each_other() -> None:
    answer = Answer(claim(n=3, seed=2**63 - 2), Letters())
    assert [answer.engine_params(i)["seed"] for i in range(3)] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert "n" not in answer.engine_params()
    for index, text in enumerate(("one", "two", "three")):
        answer.choices[index].absorb(ids(text), "length" if index == 1 else "stop")
        assert answer.unfinished == list(range(index + 1, 3))
    assert answer.result() == {
        "choices": [
            {"text": "one", "finish_reason": "stop"},
            {"text": "two", "finish_reason": "length"},
            {"text": "three", "finish_reason": "stop"},
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 11, "cached_tokens": 0},
    }


def test_each_choice_is_continued_where_it_was() -> None:
    given = claim([("a", "a"), ("b", "b"), ("ax", "ax")], n=2, max_tokens=3)
    chunks = [
        {"text": "ab", "ids": ids("ab")},
        {"text": "c", "ids": ids("c"), "index": 1},
        {"text": "d", "ids": ids("d")},
    ]
    answer = Answer(
        given._replace(chunks=[StoredChunk(str(n), 1, 1, pack(c)) for n, c in enumerate(chunks)]), Letters()
    )
    assert [choice.prior for choice in answer.choices] == [ids("abd"), ids("c")]
    assert answer.unfinished == [1]


def test_the_cost_is_told_in_steps() -> None:
    answer = Answer(claim(), Letters())
    told = []
    for _ in range(100):
        answer.choices[0].absorb(ids("ab"), None)
        told.append(answer.grown_cost())
    assert [cost for cost in told if cost] == [131, 259, 387]
    assert answer.cost == 3 + 2 * 200
