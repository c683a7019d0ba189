import asyncio

import pytest

from stoker.queue.records import Claim
from stoker.runtime.spec import FunctionSpec
from stoker.runtime.worker.company import Company, company, fitting

SPEC = FunctionSpec(name="f", kind="python", entry="a:f", concurrency=16)


def claim(job_id: str = "j", attempt: int = 1, most: int = 3) -> Claim:
    return Claim(job_id, "f", "t", b"", 1, attempt, most, False, "", 0, 0, 0, [])


@pytest.mark.parametrize(
    ("attempt", "most_attempts", "expected"),
    [(1, 3, 16), (2, 3, 4), (3, 3, 1), (1, 1, 16), (2, 2, 1), (1, 5, 16), (2, 5, 8), (3, 5, 4), (4, 5, 2), (5, 5, 1)],
)
def test_company_shrinks_with_attempts(attempt: int, most_attempts: int, expected: int) -> None:
    assert company(claim("j", attempt, most_attempts), 16) == expected


def test_who_may_begin_beside_whom() -> None:
    new, second, last = claim("n"), claim("s", 2), claim("l", 3)
    assert fitting([new] * 20, [new] * 16, 16) == 20, "only suspects are counted here"
    assert fitting([second] * 6, [], 16) == 4
    assert fitting([second] * 6, [second] * 3, 16) == 1
    assert fitting([new] * 6, [second], 16) == 3
    assert fitting([second], [new] * 4, 16) == 0
    assert fitting([last, new], [], 16) == 1
    assert fitting([last], [new], 16) == 0 and fitting([new], [last], 16) == 0


class Running:
    def __init__(self) -> None:
        self.held: dict[str, Claim] = {}
        self.changed, self.stopping = asyncio.Event(), asyncio.Event()
        self.returned: list[str] = []
        self.begun: list[list[str]] = []
        self.company = Company(SPEC, self.held, self.changed, self.stopping, self.give_back)

    def give_back(self, claim: Claim) -> None:
        self.returned.append(claim.job_id)
        self.end(claim.job_id)

    def end(self, *job_ids: str) -> None:
        for job_id in job_ids:
            del self.held[job_id]
        self.changed.set()

    async def run(self, claims: list[Claim]) -> None:
        self.held.update({claim.job_id: claim for claim in claims})
        async for group in self.company.groups(claims):
            self.begun.append([claim.job_id for claim in group])


async def test_groups_begin_as_their_forerunners_end() -> None:
    here = Running()
    task = asyncio.create_task(here.run([claim(f"{n}", 2) for n in range(6)]))
    await asyncio.sleep(0)
    assert here.begun == [["0", "1", "2", "3"]] and here.company.waiting == {"4", "5"}
    here.end("1", "5")
    await task
    assert here.begun[1:] == [["4"]] and not here.company.waiting


async def test_what_waits_goes_back_when_the_replica_stops() -> None:
    here = Running()
    task = asyncio.create_task(here.run([claim("a", 3), claim("b", 3)]))
    await asyncio.sleep(0)
    here.stopping.set()
    here.changed.set()
    await task
    assert here.begun == [["a"]] and here.returned == ["b"] and list(here.held) == ["a"]


def test_suspects_are_claimed_one_by_one() -> None:
    here = Running()
    assert [here.company.room(9) for _ in range(2)] == [1, 9], "the first job of a new replica comes alone"
    here.held["a"] = claim("a", 2)
    assert here.company.room(9) == 1
    here.held.update({name: claim(name) for name in "bcd"})
    assert here.company.room(9) == 0
    assert here.company.room(0) == 0


async def test_nothing_begins_once_it_is_closed() -> None:
    here = Running()
    task = asyncio.create_task(here.run([claim("a", 3), claim("b", 3)]))
    await asyncio.sleep(0)
    here.company.close()
    await task
    assert here.begun == [["a"]] and not here.returned and here.company.waiting == {"b"}
