"""Jobs in pages, read from the keys that the queue has anyway: leases, lanes, delays, and the usage record of each end.

An index of its own would cost every job; this costs only who lists. The order is that of the sections: what runs, what
waits in its order, what waits for its delay, and what has ended, the latest end first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from redis.asyncio import Redis

from stoker.queue import replies
from stoker.queue.records import Job, JobState
from stoker.queue.scripts import Scripts

Section = Literal["running", "queued", "delayed", "ended"]
SECTIONS: tuple[Section, ...] = get_args(Section)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a page ends: behind this job of this section; `position` is the section's own."""

    section: Section
    function: str
    position: str

    def __str__(self) -> str:
        return f"{self.section}:{self.function}:{self.position}"

    @classmethod
    def of(cls, text: str) -> "Place":
        """Raises ValueError."""
        section, function, position = text.split(":")
        return cls(SECTIONS[SECTIONS.index(section)], function, position)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Part:
    """One function's rows of a section; `rest` is where to go on, None at its end."""

    rows: list[tuple[Job, Place]]
    rest: Place | None


@dataclass(frozen=True, slots=True)
class Page:
    """`next` is None at the end; a page may be short, or empty, and not the last one."""

    jobs: list[Job]
    next: Place | None


class Listing:
    def __init__(self, client: Redis) -> None:
        self._scripts = Scripts(client)

    async def page(
        self, functions: Iterable[str], limit: int, after: Place | None = None, *, tenant: str = "", state: str = ""
    ) -> Page:
        """Of one tenant and one state, if given; at most a few thousand jobs of each function are looked at."""
        names, rows = sorted(functions), []
        for section in sections_of(state):
            if after and SECTIONS.index(section) < SECTIONS.index(after.section):
                continue
            behind = after if after and after.section == section else None
            parts = await self._parts(section, names, behind, tenant, state, limit + 1 - len(rows))
            found, rest = by_end(parts) if section == "ended" else in_turn(parts)
            rows += found
            if len(rows) > limit:
                return Page([job for job, _ in rows[:limit]], rows[limit - 1][1])
            if rest:
                return Page([job for job, _ in rows], rest)
        return Page([job for job, _ in rows], None)

    async def _parts(
        self, section: Section, names: Sequence[str], after: Place | None, tenant: str, state: str, most: int
    ) -> list[Part]:
        groups: dict[str, list[str]] = {}
        for name in names:
            if (position := start_of(section, name, after)) is not None:
                groups.setdefault(position, []).append(name)
        found: dict[str, Part] = {}
        for position, members in groups.items():
            answers = await self._scripts.run_each("list", members, [section, tenant, state, position, most])
            found |= {name: part_of(section, name, each) for name, each in zip(members, answers, strict=True)}
        return [found[name] for name in sorted(found)]


def sections_of(state: str) -> tuple[Section, ...]:
    if not state:
        return SECTIONS
    if JobState(state).terminal:
        return ("ended",)
    if state == JobState.RUNNING:
        return ("running",)
    # What a worker keeps without running it is queued.
    return ("running", "queued", "delayed") if state == JobState.QUEUED else ("queued", "delayed")


def start_of(section: Section, name: str, after: Place | None) -> str | None:
    """The position behind which a function's rows are still to come; None when none are. Ended jobs of all functions
    stand in one order, by time and then by function; other sections go function by function."""
    if after is None:
        return ""
    if section == "ended":
        return after.position if name > after.function else f"({after.position}"
    if name == after.function:
        return after.position
    return "" if name > after.function else None


def part_of(section: Section, name: str, answer: Any) -> Part:
    rest, rows = answer
    found = [
        (replies.job(name, id.decode(), [fields, None, None]), Place(section, name, position.decode()))
        for id, position, fields in rows
    ]
    return Part(found, Place(section, name, rest.decode()) if rest else None)


def in_turn(parts: Iterable[Part]) -> tuple[list[tuple[Job, Place]], Place | None]:
    rows: list[tuple[Job, Place]] = []
    for part in parts:
        rows += part.rows
        if part.rest:
            return rows, part.rest
    return rows, None


def by_end(parts: Sequence[Part]) -> tuple[list[tuple[Job, Place]], Place | None]:
    """The latest end first, as far as every part is known."""
    rests = sorted((part.rest for part in parts if part.rest), key=end_key)
    rows = sorted((row for part in parts for row in part.rows), key=lambda row: end_key(row[1]))
    return [row for row in rows if not rests or end_key(row[1]) <= end_key(rests[0])], next(iter(rests), None)


def end_key(place: Place) -> tuple[int, int, str]:
    milliseconds, _, number = place.position.partition("-")
    return -int(milliseconds), -int(number), place.function
