"""What a host must do to have the replicas it is wanted to have: a pure comparison."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Change:
    """Replica ids to start (with their records), to stop soon, and to stop once what they hold is done."""

    start: dict[str, dict[str, Any]]
    stop: list[str]
    drain: list[str] = field(default_factory=list)


def compare(wanted: Mapping[str, dict[str, Any]], present: Mapping[str, str]) -> Change:
    """`present` maps replica id to state. What already stops is left alone; what is gone can't come back by itself."""
    start = {id: record for id, record in wanted.items() if id not in present and not record.get("draining")}
    stop = [id for id, state in present.items() if id not in wanted and state not in ("draining", "gone")]
    drain = [id for id, record in wanted.items() if record.get("draining") and present.get(id) == "ready"]
    return Change(start, stop, drain)
