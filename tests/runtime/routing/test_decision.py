import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.runtime.routing.decision import Decision, TargetState, among, by_examples, by_rule, with_fallback
from stoker.runtime.routing.facts import Facts, difficulty
from stoker.runtime.routing.router import Route, Router

PLAIN = Facts("Where is my order 4711?", 200)
AWAKE, ASLEEP = TargetState(awake=True), TargetState()
FULL, FAILING = TargetState(waiting=9, room=9, awake=True), TargetState(failing=True)


def router(*routes: Route, **fields: Any) -> Router:
    return Router(routes or (Route("a", tools=True),), "z", **fields)


@pytest.mark.parametrize(
    ("conditions", "facts", "taken"),
    [
        ({"min_chars": 200}, PLAIN, True),
        ({"min_chars": 201}, PLAIN, False),
        ({"max_chars": 200}, PLAIN, True),
        ({"min_chars": 100, "max_chars": 199}, PLAIN, False),
        ({"tools": True}, Facts("x", 1, tools=True), True),
        ({"tools": True}, PLAIN, False),
        ({"tools": False}, PLAIN, True),
        ({"structured": True}, Facts("x", 1, structured=True), True),
        ({"structured": True}, PLAIN, False),
        ({"keywords": ("parcel", "ORDER")}, PLAIN, True),
        ({"keywords": ("ord",)}, PLAIN, False),
        ({"keywords": ("c++",)}, Facts("Do you know C++?", 9), True),
        ({"keywords": ("a b", "é (x)")}, Facts("say É (X)", 9), True),
        ({"keywords": ("order",)}, Facts("order", 5), True),
        ({"keywords": ("order",)}, Facts("reorder, orders", 5), False),
        ({"pattern": r"order \d{4}\b"}, PLAIN, True),
        ({"pattern": r"^order"}, PLAIN, False),
        ({"metadata": {"type": "look-up"}}, Facts("", 0, metadata={"type": "look-up", "b": "c"}), True),
        ({"metadata": {"type": "look-up"}}, Facts("", 0, metadata={"type": "other"}), False),
        ({"max_difficulty": 0.2}, PLAIN, True),
        ({"min_difficulty": 0.2}, PLAIN, False),
        ({"keywords": ("order",), "min_chars": 1000}, PLAIN, False),
        ({"keywords": ("order",), "min_chars": 10}, PLAIN, True),
    ],
)
def test_a_route_is_taken_when_all_its_conditions_hold(conditions: dict[str, Any], facts: Facts, taken: bool) -> None:
    decision = by_rule(router(Route("a", **conditions)), facts)
    assert (decision is not None) == taken
    if decision:
        assert (decision.target, decision.reason) == ("a", "rule") and decision.detail


def test_the_first_route_that_holds_is_taken_and_says_why() -> None:
    routes = router(Route("a", tools=True), Route("b", keywords=("order",), min_chars=9), Route("c", min_chars=1))
    assert by_rule(routes, PLAIN) == Decision("b", "rule", "200 characters, keyword")


def test_examples_decide_nothing_by_themselves() -> None:
    taught = router(Route("a", examples=("x",)), Route("b", examples=("y",)), embed="e")
    assert by_rule(taught, PLAIN) is None


def test_an_unsure_likeness_goes_to_the_default() -> None:
    rules = router(min_score=0.7)
    assert by_examples(rules, {"a": 0.8, "b": 0.2}) == Decision("a", "examples", score=0.8)
    unsure = by_examples(rules, {"a": 0.6, "b": 0.4})
    assert (unsure.target, unsure.reason, unsure.score) == ("z", "default", 0.6) and "a" in unsure.detail


@pytest.mark.parametrize(
    ("fields", "mine", "other", "because"),
    [
        ({}, AWAKE, AWAKE, ""),
        ({}, FULL, AWAKE, "overloaded"),
        ({}, FULL, FULL, ""),
        ({}, FULL, FAILING, ""),
        ({}, FAILING, ASLEEP, "failing"),
        ({"max_queued": 5}, TargetState(waiting=5, awake=True), AWAKE, "overloaded"),
        ({"max_queued": 5}, TargetState(waiting=4, awake=True), AWAKE, ""),
        ({"max_queued": 50}, FULL, AWAKE, "overloaded"),
        ({}, ASLEEP, AWAKE, ""),
        ({"prefer_awake": True}, ASLEEP, AWAKE, "asleep"),
        ({"prefer_awake": True}, ASLEEP, ASLEEP, ""),
        ({"prefer_awake": True}, AWAKE, AWAKE, ""),
        ({"prefer_awake": True}, ASLEEP, FULL, ""),
    ],
)
def test_a_fallback_helps_out_only_if_it_can(
    fields: dict[str, Any], mine: TargetState, other: TargetState, because: str
) -> None:
    rules = router(fallbacks={"a": "b"}, **fields)
    decision = with_fallback(rules, Decision("a", "rule", "tools"), {"a": mine, "b": other})
    wanted = ("b", "a", because) if because else ("a", "", "")
    assert (decision.target, decision.instead_of, decision.because) == wanted
    assert (decision.reason, decision.detail) == ("rule", "tools")


def test_a_target_without_fallback_is_kept() -> None:
    decision = Decision("z", "default")
    assert with_fallback(router(fallbacks={"a": "b"}), decision, {"z": FULL, "b": AWAKE}) is decision


@pytest.mark.parametrize(
    ("there", "taker"),
    [("abzyc", "a"), ("bzyc", "b"), ("zyc", "z"), ("yc", "y"), ("c", "c")],
)
def test_a_target_that_is_gone_is_stood_in_for(there: str, taker: str) -> None:
    rules = router(Route("a", tools=True), Route("c", tools=False), fallbacks={"a": "b", "z": "y"})
    decision = among(rules, Decision("a", "rule", "tools"), set(there))
    gone = ("", "") if taker == "a" else ("a", "missing")
    assert (decision.target, decision.instead_of, decision.because) == (taker, *gone)
    states = dict.fromkeys(there, FULL)
    assert with_fallback(rules, decision, states).target in there


def test_the_header_says_it_in_one_line() -> None:
    assert Decision("a", "rule", "anything at all").header() == "a; reason=rule"
    told = Decision("b", "examples", "", 0.87654, "a", "overloaded").header()
    assert told == "b; reason=examples; score=0.877; instead-of=a; because=overloaded"


EASY = ["Hello!", "Where is my parcel?", "thanks", "What time do you open?"]
HARD = [
    "Explain why quicksort is quadratic in the worst case and compare it with mergesort.",
    "def f(x):\n    return x + 1\n\nWhy does this fail? How do I debug it?",
    "Prove that 2^n > n^2 for n > 4. Then derive a bound for n = 3 * 7.",
]


def test_hard_questions_look_harder_than_easy_ones() -> None:
    for easy, hard in itertools.product(EASY, HARD):
        assert difficulty(easy) < 0.2 < 0.35 <= difficulty(hard)


@given(st.text(), st.text())
def test_difficulty_is_a_share(text: str, more: str) -> None:
    assert 0 <= difficulty(text) <= 1
    assert difficulty(text) <= difficulty(text + "\n" + more) + 1e-9
