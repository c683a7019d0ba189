"""The phases of a start: a waterfall that stays on the job record."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

Record = dict[str, Any]


class Row(NamedTuple):
    """One line of a printed timeline; `facts` is everything else that was recorded."""

    name: str
    start_s: float
    seconds: float
    bytes: int
    facts: dict[str, Any]


class Timeline:
    """Times are CLOCK_MONOTONIC nanoseconds, comparable between the processes of one host. Thread-safe."""

    def __init__(self) -> None:
        self._records: list[Record] = []

    @contextmanager
    def phase(self, name: str, **facts: Any) -> Iterator[Record]:
        """Records the block's duration, also when it raises; facts known only at its end go into what it yields."""
        start = time.monotonic_ns()
        try:
            yield facts
        finally:
            self.add(name, start, time.monotonic_ns(), **facts)

    def add(self, name: str, start_ns: int, end_ns: int, **facts: Any) -> None:
        self._records.append({"name": name, "start_ns": start_ns, "end_ns": end_ns, **facts})

    def extend(self, records: Iterable[Record]) -> None:
        self._records.extend(records)

    def records(self) -> list[Record]:
        return sorted(self._records, key=lambda record: (record["start_ns"], record["end_ns"]))

    def take(self) -> list[Record]:
        """All records so far, which are then forgotten."""
        taken, self._records = self.records(), []
        return taken

    @staticmethod
    def table(records: Iterable[Record]) -> list[Row]:
        """Rows in order of their start, in seconds after the first start."""
        ordered = sorted(records, key=lambda record: (record["start_ns"], record["end_ns"]))
        return [row(record, ordered[0]["start_ns"]) for record in ordered]


def row(record: Record, origin_ns: int) -> Row:
    facts = {key: value for key, value in record.items() if key not in ("name", "start_ns", "end_ns", "bytes")}
    return Row(
        record["name"],
        (record["start_ns"] - origin_ns) / 1e9,
        (record["end_ns"] - record["start_ns"]) / 1e9,
        record.get("bytes", 0),
        facts,
    )
