"""Which of a router's targets answers a request: a pure reading of the request and of the targets' state."""

from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from pydantic_core import SchemaValidator, ValidationError

from stoker.runtime.routing.facts import Facts, difficulty
from stoker.runtime.routing.router import Route, Router, matcher

Reason = Literal["rule", "examples", "default", "repeated"]


@dataclass(frozen=True, slots=True)
class TargetState:
    """`waiting` requests of `room`; `awake`: a replica is ready; `failing`: none is, and none can start."""

    waiting: int = 0
    room: int = 1 << 30
    awake: bool = False
    failing: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """`detail` says in words what decided, `score` how sure the examples are; `instead_of`: the target that could not
    take the request, and `because` why."""

    target: str
    reason: Reason
    detail: str = ""
    score: float | None = None
    instead_of: str = ""
    because: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def header(self) -> str:
        parts = [self.target, f"reason={self.reason}"]
        parts += [f"score={self.score:.3f}"] if self.score is not None else []
        parts += [f"instead-of={self.instead_of}", f"because={self.because}"] if self.instead_of else []
        return "; ".join(parts)


def by_rule(router: Router, facts: Facts) -> Decision | None:
    """The first route whose conditions all hold."""
    for route in router.routes:
        if route.has_conditions and (held := what_holds(route, facts)):
            return Decision(route.target, "rule", ", ".join(held))
    return None


def by_examples(router: Router, scores: Mapping[str, float]) -> Decision:
    """`scores`: how likely each target is."""
    target = max(sorted(scores), key=scores.__getitem__)
    if scores[target] >= router.min_score:
        return Decision(target, "examples", score=scores[target])
    return Decision(router.default, "default", f"the likeliest, {target}, is too unsure", score=scores[target])


def among(router: Router, decision: Decision, targets: Container[str]) -> Decision:
    """The decision; or, when its target is none of those that are there, the first of these that is: its fallback, the
    default, the default's fallback, any other."""
    if decision.target in targets:
        return decision
    fallback, last = router.fallbacks.get(decision.target, ""), router.fallbacks.get(router.default, "")
    target = next(name for name in (fallback, router.default, last, *router.targets) if name in targets)
    return replace(decision, target=target, instead_of=decision.target, because="missing")


def with_fallback(router: Router, decision: Decision, states: Mapping[str, TargetState]) -> Decision:
    """The decision, or the fallback of its target when that can take the request and the target can't."""
    other = router.fallbacks.get(decision.target)
    if not other or other not in states:
        return decision
    mine, its = states.get(decision.target, TargetState()), states[other]
    because = why_not(router, mine)
    if because and not why_not(router, its):
        return replace(decision, target=other, instead_of=decision.target, because=because)
    if router.prefer_awake and not mine.awake and its.awake and not why_not(router, its):
        return replace(decision, target=other, instead_of=decision.target, because="asleep")
    return decision


def why_not(router: Router, state: TargetState) -> str:
    """Why a target should be spared; "" if it need not."""
    if state.failing:
        return "failing"
    return "overloaded" if state.waiting >= min(router.max_queued or state.room, state.room) else ""


def what_holds(route: Route, facts: Facts) -> list[str]:
    """The route's conditions in words, if all of them hold; else nothing."""
    hard = difficulty(facts.text)
    checks: dict[str, bool | None] = {
        f"{facts.chars} characters": within(facts.chars, route.min_chars, route.max_chars),
        f"difficulty {hard:.2f}": within(hard, route.min_difficulty, route.max_difficulty),
        "tools" if facts.tools else "no tools": same(route.tools, facts.tools),
        "structured" if facts.structured else "not structured": same(route.structured, facts.structured),
        "keyword": is_found(route.keyword_pattern, facts.text) if route.keywords else None,
        "pattern": is_found(route.pattern, facts.text) if route.pattern else None,
        "metadata": route.metadata.items() <= facts.metadata.items() if route.metadata else None,
    }
    given = {name: holds for name, holds in checks.items() if holds is not None}
    return list(given) if all(given.values()) else []


def within(value: float, least: float | None, most: float | None) -> bool | None:
    if least is None and most is None:
        return None
    return (least is None or value >= least) and (most is None or value <= most)


def same(wanted: bool | None, found: bool) -> bool | None:
    return None if wanted is None else wanted == found


@lru_cache(maxsize=1024)
def compiled(pattern: str) -> SchemaValidator:
    return matcher(pattern)


def is_found(pattern: str, text: str) -> bool:
    try:
        compiled(pattern).validate_python(text)
    except ValidationError:
        return False
    return True
