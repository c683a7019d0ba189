"""A router's declaration: one model name that stands for several, and how each request finds the right one."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import SchemaError, SchemaValidator, core_schema

from stoker.runtime.requirement import reject_unknown, require

MOST_ROUTES = 64
MOST_EXAMPLES = 2048
MOST_WORDS = 1000
MOST_PATTERN = 1000
MOST_COUNT = 10**9
CONDITIONS = ("min_chars", "max_chars", "min_difficulty", "max_difficulty", "tools", "structured")


@dataclass(frozen=True, slots=True)
class Route:
    """A way to the model `target`. It is taken when all conditions that are given hold of a request: the length of its
    conversation in characters; how hard its last message looks, from 0 to 1; whether it offers `tools`; whether it asks
    for a `structured` answer; one of `keywords` as a whole word, or `pattern` (linear-time regular expression), in its
    last message; entries of its `metadata`. Or because its last message is like `examples`, and less like those of the
    other routes."""

    target: str
    min_chars: int | None = None
    max_chars: int | None = None
    min_difficulty: float | None = None
    max_difficulty: float | None = None
    tools: bool | None = None
    structured: bool | None = None
    keywords: tuple[str, ...] = ()
    pattern: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    examples: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(
            not isinstance(self.keywords, str) and not isinstance(self.examples, str),
            "keywords and examples are tuples of texts, with a comma even if there is only one",
        )
        require(
            self.has_conditions or bool(self.examples),
            f"the route to {self.target!r} needs a condition or examples (what goes nowhere else goes to the default)",
        )
        for name in ("min_chars", "max_chars"):
            value = getattr(self, name)
            require(value is None or 0 <= value <= MOST_COUNT, f"{name} must be 0 to {MOST_COUNT}, not {value}")
        for name in ("min_difficulty", "max_difficulty"):
            value = getattr(self, name)
            require(value is None or 0 <= value <= 1, f"{name} must be 0 to 1, not {value}")
        require(len(self.keywords) <= MOST_WORDS, f"a route has at most {MOST_WORDS} keywords")
        require(all(text.strip() for text in (*self.keywords, *self.examples)), "keywords and examples can't be empty")
        require(len(self.pattern) <= MOST_PATTERN, f"a pattern has at most {MOST_PATTERN} characters")
        for pattern in filter(None, (self.pattern, self.keyword_pattern)):
            matcher(pattern)

    @property
    def keyword_pattern(self) -> str:
        """Finds any of the keywords as a whole word, in capitals or not; "" when there are none."""
        words = "|".join(map(re.escape, self.keywords))
        return rf"(?i)(?:^|\W)(?:{words})(?:\W|$)" if words else ""

    @property
    def has_conditions(self) -> bool:
        given = any(getattr(self, name) is not None for name in CONDITIONS)
        return given or bool(self.keywords or self.pattern or self.metadata)


@dataclass(frozen=True, slots=True)
class Router:
    """Conditions are tried route by route. What none of them takes goes by likeness to the examples, if one of them is
    as sure as `min_score`, as the embedding model `embed` says within `classify_within_ms`; the rest goes to `default`.

    `fallbacks` names another target for one that fails to start, that has `max_queued` requests waiting (0: as many as
    its own limit allows), or, with `prefer_awake`, that sleeps while the other is awake.
    """

    routes: tuple[Route, ...]
    default: str
    embed: str = ""
    min_score: float = 0.5
    classify_within_ms: float = 500.0
    fallbacks: dict[str, str] = field(default_factory=dict)
    max_queued: int = 0
    prefer_awake: bool = False

    def __post_init__(self) -> None:
        require(1 <= len(self.routes) <= MOST_ROUTES, f"a router has 1 to {MOST_ROUTES} routes")
        require(0 <= self.min_score <= 1, f"min_score must be 0 to 1, not {self.min_score}")
        require(
            1 <= self.classify_within_ms <= 60_000,
            f"classify_within_ms must be 1 to 60000, not {self.classify_within_ms}",
        )
        require(0 <= self.max_queued <= MOST_COUNT, f"max_queued must be 0 to {MOST_COUNT}, not {self.max_queued}")
        require(not self.prefer_awake or bool(self.fallbacks), "prefer_awake needs fallbacks: {'target': 'other'}")
        require(all(a != b for a, b in self.fallbacks.items()), "a target can't be its own fallback")
        strange = sorted(set(self.fallbacks) - {self.default, *(route.target for route in self.routes)})
        require(not strange, f"fallbacks are for targets of this router, which {', '.join(strange)} is not")
        self._check_examples()

    def _check_examples(self) -> None:
        taught = {route.target for route in self.routes if route.examples}
        count = sum(len(route.examples) for route in self.routes)
        require(count <= MOST_EXAMPLES, f"a router has at most {MOST_EXAMPLES} examples, not {count}")
        require(not taught or bool(self.embed), "examples need embed='…', the name of a deployed embedding model")
        require(not self.embed or len(taught) > 1, "examples are needed of two targets at least, to tell them apart")

    @property
    def targets(self) -> tuple[str, ...]:
        named = [route.target for route in self.routes]
        return tuple(dict.fromkeys((*named, self.default, *self.fallbacks.values())))

    @property
    def lessons(self) -> list[tuple[str, str]]:
        """Each example and its target."""
        return [(text, route.target) for route in self.routes for text in route.examples]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Router":
        values = dict(data)
        reject_unknown("router", values, cls)
        values["routes"] = tuple(map(route_of, values.get("routes", ())))
        return cls(**values)


def route_of(data: Any) -> Route:
    if isinstance(data, Route):
        return data
    require(isinstance(data, Mapping), f"a route is an object, not {type(data).__name__}")
    values = dict(data)
    reject_unknown("route", values, Route)
    lists = {name: tuple(values[name]) for name in ("keywords", "examples") if name in values}
    return Route(**{**values, **lists})


def matcher(pattern: str) -> SchemaValidator:
    """Takes texts that the pattern is found in. Its time is linear in the text, whoever wrote the pattern."""
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        require(False, f"the pattern {pattern[:200]!r} can't be used (look-around and back references can't): {reason}")
        raise
