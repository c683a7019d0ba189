"""What a host must do to have the replicas it is wanted to have: a pure comparison."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Change:
    """Replica ids to start (with their records) and to stop."""

    start: dict[str, dict[str, Any]]
    stop: list[str]


def compare(wanted: Mapping[str, dict[str, Any]], present: Mapping[str, str]) -> Change:
    """`present` maps replica id to state. What already stops is left alone; what is gone can't come back by itself."""
    start = {id: record for id, record in wanted.items() if id not in present}
    stop = [id for id, state in present.items() if id not in wanted and state not in ("draining", "gone")]
    return Change(start, stop)
