"""The window of inputs under way, against the plain meaning of map."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.runtime.client.async_client import AsyncClient
from stoker.runtime.client.errors import InvalidInput
from stoker.runtime.client.mapping import HELD, Mapping


class Gates:
    """Inputs that end when the test says so; odd ones above 100 fail."""

    def __init__(self, concurrency: int, *, ordered: bool = True, return_exceptions: bool = False) -> None:
        self.gates: dict[int, asyncio.Event] = {}
        self.given_up: list[int] = []
        self.mapping = Mapping(self.run, self.give_up, concurrency, return_exceptions, ordered)

    async def run(self, place: int, value: int) -> int:
        self.gates[place] = asyncio.Event()
        await self.gates[place].wait()
        if value > 100:
            raise InvalidInput(f"no {value}")
        return -value

    async def give_up(self, places: list[int]) -> None:
        self.given_up = places

    async def let(self, place: int) -> None:
        while place not in self.gates:
            await asyncio.sleep(0)
        self.gates[place].set()
        while place in self.mapping._running:
            await asyncio.sleep(0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 9), st.booleans(), st.randoms(use_true_random=False))
def test_every_input_has_one_result(values: list[int], concurrency: int, ordered: bool, random) -> None:  # type: ignore[no-untyped-def]
    async def run(place: int, value: int) -> tuple[int, int]:
        for _ in range(random.randrange(6)):
            await asyncio.sleep(0)
        return place, value

    async def never(places: list[int]) -> None:
        raise AssertionError(places)

    class Local(AsyncClient):
        def _mapping(self, *_: object) -> Mapping:
            return Mapping(run, never, concurrency, False, ordered)

    async def collect() -> list[tuple[int, int]]:
        async with Local("http://127.0.0.1:9") as client:
            return [result async for result in client.map("f", values)]

    results = asyncio.run(collect())
    wanted = list(enumerate(values))
    assert results == wanted if ordered else sorted(results) == wanted


async def test_a_slow_first_input_holds_back_a_bounded_number_of_results() -> None:
    gates = Gates(4)
    run, added = gates.mapping, 0
    while not run.full:
        assert await run.add(added) == []
        added += 1
        await asyncio.sleep(0)
        if run.full:
            for place in range(1, added):
                await gates.let(place)
    assert 4 * HELD <= added <= 4 * (HELD + 1) and run.full
    await gates.let(0)
    results = await run.ended()
    assert results == [-value for value in range(len(results))] and len(results) >= 4 * HELD
    await run.close()


async def test_the_first_failure_is_raised_in_its_turn() -> None:
    gates = Gates(9)
    for value in (1, 101, 2):
        await gates.mapping.add(value)
    await gates.let(1)
    await gates.let(2)
    await gates.let(0)
    assert await gates.mapping.ended() == [-1]
    with pytest.raises(InvalidInput, match="no 101"):
        await gates.mapping.ended()
    await gates.mapping.close()
    assert gates.given_up == []


async def test_failures_stand_in_their_places_when_asked() -> None:
    gates = Gates(9, return_exceptions=True)
    for value in (1, 101, 2):
        await gates.mapping.add(value)
    for place in (2, 1, 0):
        await gates.let(place)
    first, second, third = await gates.mapping.ended()
    assert (first, str(second), third) == (-1, "no 101", -2) and not gates.mapping.busy


async def test_what_still_runs_is_given_up_at_the_end() -> None:
    gates = Gates(9)
    for value in range(3):
        await gates.mapping.add(value)
    await gates.let(1)
    await gates.mapping.close()
    assert gates.given_up == [0, 2]


async def test_inputs_may_come_from_an_async_generator() -> None:
    async def numbers() -> AsyncIterator[int]:
        for number in range(5):
            await asyncio.sleep(0)
            yield number

    gates = Gates(2)

    class Local(AsyncClient):
        def _mapping(self, *_: object) -> Mapping:
            return gates.mapping

    async with Local("http://127.0.0.1:9") as client, aclosing(client.map("f", numbers())) as results:
        opening = asyncio.create_task(open_all(gates))
        assert [result async for result in results] == [-n for n in range(5)]
        await opening


async def open_all(gates: Gates) -> None:
    for place in range(5):
        await gates.let(place)


def test_no_concurrency_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        Gates(0)
