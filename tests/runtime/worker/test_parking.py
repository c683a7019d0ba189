"""Which idle models stay in host memory, against an engine link that only counts."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stoker.runtime.settings import Settings
from stoker.runtime.spec import ModelOptions
from stoker.runtime.worker.own_copy import OwnCopy
from stoker.runtime.worker.parking import Parked, Parking, parking_name


@dataclass
class Link:
    device: str = "cuda:0"
    pid: int | None = 7
    uses: int = 0
    sent: list[Any] = field(default_factory=list)

    def hold(self) -> None:
        self.uses += 1

    async def leave(self) -> None:
        self.uses -= 1

    def send(self, frame: Any) -> None:
        self.sent.append(frame)


def parking(tmp_path: Path, **settings: Any) -> Parking:
    return Parking(Settings(tmp_path, **{"park_s": 60.0, "park_gb": 100e-9, **settings}))


def park(place: Parking, name: str, link: Link, size: int = 40) -> Parked | None:
    parked = place.offer(name, link, None, size)  # type: ignore[arg-type]
    if parked:
        parked.made.set()
        place.give_back(parked)
    return parked


async def gone(link: Link, uses: int = 0) -> None:
    async with asyncio.timeout(30):
        while link.uses != uses:
            await asyncio.sleep(0)


async def test_a_parked_model_is_found_and_keeps_the_process(tmp_path: Path):
    place, link = parking(tmp_path), Link()
    first = park(place, "a", link)
    assert await place.borrow("a", link) is first and link.uses == 1
    assert await place.borrow("b", link) is None
    assert await place.borrow("a", Link("cuda:1")) is None
    assert place.ledger.table() == {"('cuda:0', 'a')": (40, 0)}
    await place.close()


async def test_the_longest_unused_goes_first_and_one_in_use_stays(tmp_path: Path):
    place, link = parking(tmp_path), Link()
    a, _ = park(place, "a", link), park(place, "b", link)
    assert await place.borrow("a", link) is a
    assert park(place, "c", link)
    assert [frame["name"] for frame in link.sent] == ["b"]
    await gone(link, 2)
    assert a and await place.borrow("c", link)
    assert park(place, "d", link) is None, "a and c are in use"
    place.give_back(a)
    assert park(place, "d", link)
    assert [frame["name"] for frame in link.sent] == ["b", "a"]


async def test_what_is_too_large_or_not_to_be_kept_is_not_parked(tmp_path: Path):
    assert park(parking(tmp_path), "a", Link(), size=101) is None
    assert park(parking(tmp_path, park_s=0.0), "a", Link()) is None
    assert park(parking(tmp_path, park_s=None), "a", Link("cpu")) is None
    assert park(parking(tmp_path, park_s=None), "a", Link("cuda:0")) is not None


async def test_its_time_ends(tmp_path: Path):
    place, link = parking(tmp_path, park_s=0.01), Link()
    park(place, "a", link)
    await gone(link)
    assert await place.borrow("a", link) is None and place.ledger.free == 100


async def test_a_model_that_is_being_made_is_waited_for(tmp_path: Path):
    place, link = parking(tmp_path), Link()
    parked = place.offer("a", link, None, 40)  # type: ignore[arg-type]
    assert parked
    asking = asyncio.create_task(place.borrow("a", link))
    await asyncio.sleep(0)
    assert not asking.done()
    parked.made.set()
    assert await asking is parked
    await place.close()


async def test_one_that_could_not_be_made_is_forgotten(tmp_path: Path):
    place, link = parking(tmp_path), Link()
    parked = place.offer("a", link, None, 40)  # type: ignore[arg-type]
    assert parked
    asking = asyncio.create_task(place.borrow("a", link))
    await asyncio.sleep(0)
    place.discard(parked)
    assert await asking is None
    place.give_back(parked)
    await gone(link)
    assert place.ledger.free == 100


async def test_a_process_that_died_has_nothing_parked(tmp_path: Path):
    place, link = parking(tmp_path), Link()
    park(place, "a", link)
    link.pid = 8
    assert await place.borrow("a", link) is None
    await gone(link)
    assert link.sent == [] and place.ledger.free == 100


async def test_closing_lets_everything_go(tmp_path: Path):
    place, link = parking(tmp_path), Link()
    parked = park(place, "a", link)
    other = place.offer("b", link, None, 40)  # type: ignore[arg-type]
    assert parked and other
    await place.close()
    assert [frame["name"] for frame in link.sent] == ["a"] and park(place, "c", link) is None
    place.give_back(other)
    await gone(link)


@pytest.mark.parametrize("other", [ModelOptions(max_seqs=2), ModelOptions(dtype="float32")])
def test_names_tell_models_and_their_options_apart(other: ModelOptions):
    names = {parking_name("r", ModelOptions()), parking_name("s", ModelOptions()), parking_name("r", other)}
    assert len(names) == 3 and parking_name("r", ModelOptions()) in names


async def test_what_a_model_needs_beside_its_weights_is_counted_and_idle_ones_make_room(tmp_path: Path):
    place, link = parking(tmp_path), Link()
    park(place, "a", link)
    park(place, "b", link)
    place.take("c", 50)
    assert place.ledger.table() == {"('cuda:0', 'b')": (40, 0), "beside c": (50, 50)}
    place.take("d", 90)
    assert place.ledger.free == -40 and park(place, "e", link, 1) is None
    place.give_up("c")
    place.give_up("d")
    assert place.ledger.free == 100
    await gone(link)


async def test_a_replica_says_what_its_model_uses_of_the_hosts_memory(tmp_path: Path):
    place, link = parking(tmp_path), Link()
    copy = OwnCopy("chat-1", place, link)  # type: ignore[arg-type]
    copy.know({"parameter_bytes": 40, "host_bytes": 30})
    assert place.ledger.table() == {"beside chat-1": (30, 30)}
    copy.release()
    assert place.ledger.table() == {}
