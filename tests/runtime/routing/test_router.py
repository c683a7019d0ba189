import json
import time
from typing import Any

import pytest

import stoker
from stoker.runtime.requirement import InvalidSpec
from stoker.runtime.routing.decision import is_found
from stoker.runtime.routing.router import Route, Router
from stoker.runtime.spec import FunctionSpec

TAUGHT = (Route("a", examples=("one", "two")), Route("b", examples=("three",)))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"routes": ()}, "1 to 64 routes"),
        ({"routes": TAUGHT}, "examples need embed="),
        ({"routes": TAUGHT[:1], "embed": "e"}, "of two targets at least"),
        ({"min_score": 2}, "min_score must be 0 to 1"),
        ({"classify_within_ms": 0}, "classify_within_ms must be"),
        ({"max_queued": -1}, "max_queued must be 0 to 1000000000"),
        ({"prefer_awake": True}, "prefer_awake needs fallbacks"),
        ({"fallbacks": {"a": "a"}}, "its own fallback"),
        ({"fallbacks": {"z": "a"}}, "which z is not"),
    ],
)
def test_a_router_that_can_not_work_says_why(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidSpec, match=complaint):
        Router(**{"routes": (Route("a", tools=True),), "default": "b", **fields})


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({}, "needs a condition or examples"),
        ({"min_chars": -1}, "min_chars must be 0 to 1000000000, not -1"),
        ({"max_difficulty": 1.5}, "max_difficulty must be 0 to 1, not 1.5"),
        ({"keywords": "one"}, "with a comma even if there is only one"),
        ({"keywords": (" ",)}, "can't be empty"),
        ({"pattern": "("}, "can't be used"),
        ({"pattern": r"(a)\1"}, "back references can't"),
        ({"pattern": "(?=a)"}, "look-around"),
        ({"pattern": "a" * 1001}, "at most 1000 characters"),
    ],
)
def test_a_route_that_can_not_work_says_why(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidSpec, match=complaint):
        Route("a", **fields)


def test_a_declared_router_survives_the_wire() -> None:
    app = stoker.App("shop")
    spec = app.router(
        "front",
        routes=[Route("a", min_chars=5, metadata={"k": "v"}), *TAUGHT],
        default="b",
        embed="e",
        fallbacks={"a": "c"},
    )
    again = FunctionSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec and spec.router is not None
    assert spec.router.targets == ("a", "b", "c")
    assert spec.router.lessons == [("one", "a"), ("two", "a"), ("three", "b")]


def test_unknown_fields_and_wrong_kinds_are_refused() -> None:
    good = stoker.App("shop").router("front", routes=[Route("a", tools=True)], default="b").to_dict()
    with pytest.raises(InvalidSpec, match="unknown route field.*: colour"):
        FunctionSpec.from_dict({**good, "router": {**good["router"], "routes": [{"target": "a", "colour": 1}]}})
    with pytest.raises(InvalidSpec, match="unknown router field.*: speed"):
        FunctionSpec.from_dict({**good, "router": {**good["router"], "speed": 1}})
    with pytest.raises(InvalidSpec, match="nothing else, has 'router'"):
        FunctionSpec.from_dict({**good, "kind": "llm", "weights": "file:///x"})
    with pytest.raises(InvalidSpec, match="nothing else, has 'router'"):
        FunctionSpec.from_dict({**good, "router": None})
    with pytest.raises(InvalidSpec, match="a router has no replicas"):
        FunctionSpec.from_dict({**good, "scaling": {"min_replicas": 1}})


def test_no_pattern_takes_long() -> None:
    started = time.process_time()
    assert not is_found(r"^(a+)+$", "a" * 50_000 + "b")
    assert is_found(r"(x+x+)+y", "x" * 50_000 + "y")
    words = Route("a", keywords=tuple(f"word{n}{'x' * 20}" for n in range(1000))).keyword_pattern
    assert not is_found(words, "word" * 50_000) and is_found(words, "word" * 50_000 + " WORD999" + "x" * 20)
    assert time.process_time() - started < 2
