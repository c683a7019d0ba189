"""Whose turn it is: what must hold of every plan, and a simulated device that carries the plans out."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.runtime.pool.turns import OVERDUE_S, Place, Swap, decide, overlaps, promised, quantum

GB = 16  # Pages of a model in the simulation; a page is a GB.


@st.composite
def devices(draw: st.DrawFn) -> tuple[list[Place], int]:
    """Models side by side in an arena, with gaps, and some that aren't there."""
    places: list[Place] = []
    end = 1
    for number in range(draw(st.integers(1, 8))):
        weights, floor = draw(st.integers(1, 12)), draw(st.integers(0, 4))
        there = draw(st.booleans())
        start = end + draw(st.integers(0, 3)) if there else None
        end = start + weights if start is not None else end
        place = Place(
            name=f"m{number}", weights=weights, floor=floor, start=start,
            home=draw(st.none() | st.integers(1, 40)), queued=draw(st.integers(0, 3)),
            since=draw(st.floats(0, 100)), movable=draw(st.booleans()), swap_s=draw(st.floats(0.01, 2)),
            redo_s=draw(st.floats(0, 1)),
            level=draw(st.floats(0, 5)), requests_s=draw(st.floats(0, 10)),
            owner=draw(st.sampled_from(("", "ann", "bob"))), kept=draw(st.booleans()),
        )  # fmt: skip
        places.append(place)
    reserved = sum(place.floor for place in places if place.start is not None)
    return places, end + reserved + draw(st.integers(0, 12))


@given(devices(), st.floats(0, 200))
def test_a_plan_can_be_carried_out_and_disturbs_nobody_who_may_stay(
    device: tuple[list[Place], int], now: float
) -> None:
    places, pages = device
    swap = decide(places, pages, now)
    if swap is None:
        return
    named = {place.name: place for place in places}
    target, victims = named[swap.model], [named[name] for name in swap.victims]
    assert target.start is None and target.queued and len(set(swap.victims)) == len(victims)
    kept = promised(places, pages)
    for victim in victims:
        assert victim.name not in kept or victim.owner == target.owner or now - target.since > OVERDUE_S
        assert victim.start is not None and victim.movable
        assert not victim.queued or now - victim.since >= quantum(victim, target)
    staying = [place for place in places if place.start is not None and place not in victims]
    run = range(swap.start, swap.start + target.weights)
    assert run.start >= 1 and run.stop <= pages
    assert not any(overlaps(place, run) for place in staying)
    assert sum(place.pages for place in [*staying, target]) <= pages - 1


@given(devices(), st.floats(0, 200))
def test_a_model_that_fits_beside_the_others_sends_nobody_away(device: tuple[list[Place], int], now: float) -> None:
    places, pages = device
    there = [place for place in places if place.start is not None]
    end = max((place.start + place.weights for place in there if place.start is not None), default=1)
    small = Place("small", 1, 0, queued=1)
    room = pages - 1 - sum(place.pages for place in there)
    swap = decide([*there, small], pages, now)
    if room >= 1 and end < pages:
        assert swap and swap.model == "small" and not swap.victims


def test_the_least_likely_to_be_asked_for_goes() -> None:
    often = Place("often", 10, 1, start=1, swap_s=1, requests_s=1)
    seldom = Place("seldom", 10, 1, start=11, swap_s=1, requests_s=0.001)
    new = Place("new", 10, 1, queued=1, swap_s=1)
    assert decide([often, seldom, new], 24, 100) == Swap("new", 11, ("seldom",))


def test_of_runs_that_cost_the_same_the_old_place_is_taken() -> None:
    new = Place("new", 4, 0, queued=1, home=9)
    assert decide([new, Place("other", 4, 0, start=1)], 40, 0) == Swap("new", 9)


def test_who_is_overdue_comes_before_needier_ones_and_is_not_passed() -> None:
    busy = Place("busy", 10, 0, start=1, queued=1, since=OVERDUE_S, swap_s=100)
    late = Place("late", 10, 0, queued=1, since=0, swap_s=1, level=9)
    small = Place("small", 2, 0, queued=1, since=OVERDUE_S, swap_s=1)
    assert decide([busy, late, small], 14, 1) == Swap("small", 11)
    assert decide([busy, late, small], 14, OVERDUE_S + 1) is None


@given(devices())
def test_what_is_promised_leaves_room_for_the_largest_of_all_others(device: tuple[list[Place], int]) -> None:
    places, pages = device
    kept = promised(places, pages)
    of_promised = sum(place.pages for place in places if place.name in kept)
    others = [place.pages for place in places if place.name not in kept]
    assert kept <= {place.name for place in places if place.kept}
    assert not kept or of_promised + max(others, default=0) <= pages - 1


def test_a_kept_model_makes_room_for_its_owners_models_only() -> None:
    warm = Place("warm", 10, 1, start=1, owner="ann", kept=True)
    other = Place("other", 10, 1, start=11, queued=1, since=99, owner="bob", swap_s=1)
    new = Place("new", 10, 1, queued=1, since=99, swap_s=1)
    assert decide([warm, other, replace(new, owner="bob")], 24, 100) is None, "the other one has its quantum first"
    assert decide([warm, other, replace(new, owner="bob")], 24, 110) == Swap("new", 11, ("other",))
    assert decide([warm, other, replace(new, owner="ann")], 24, 100) == Swap("new", 1, ("warm",))
    assert decide([replace(warm, kept=False), other, replace(new, owner="bob")], 24, 100) == Swap("new", 1, ("warm",))


def test_a_kept_model_that_fills_the_device_is_not_in_the_way_of_others() -> None:
    warm = Place("warm", 20, 1, start=1, owner="ann", kept=True)
    new = Place("new", 10, 1, queued=1, since=99, owner="bob")
    assert decide([warm, new], 24, 100) == Swap("new", 1, ("warm",))


class Device:
    """Three 16 GB models on one device that holds one or two; all always have requests."""

    def __init__(self, models: int, room: int) -> None:
        self.places = [Place(f"m{i}", GB, 1, queued=1, swap_s=0.3, since=0) for i in range(models)]
        self.pages = 1 + room * (GB + 1)
        self.swaps: list[tuple[float, str]] = []
        self.ran = dict.fromkeys((place.name for place in self.places), 0.0)

    def run(self, seconds: float) -> None:
        now = 0.0
        while now < seconds:
            swap = decide(self.places, self.pages, now)
            now = self._carry_out(swap, now) if swap else self._compute(now)

    def _carry_out(self, swap: Swap, now: float) -> float:
        """Those that stay go on meanwhile."""
        after = now + 0.3
        there = [place.name for place in self.places if place.start is not None]
        self._share(0.3, [name for name in there if name not in swap.victims])
        self.swaps.append((now, swap.model))
        gone = {name: replace(place, start=None, since=now) for name, place in self._named(swap.victims)}
        come = {name: replace(place, start=swap.start, since=after) for name, place in self._named([swap.model])}
        self.places = [{**gone, **come}.get(place.name, place) for place in self.places]
        return after

    def _named(self, names: Sequence[str]) -> list[tuple[str, Place]]:
        return [(place.name, place) for place in self.places if place.name in names]

    def _compute(self, now: float) -> float:
        self._share(0.05, [place.name for place in self.places if place.start is not None])
        return now + 0.05

    def _share(self, seconds: float, names: list[str]) -> None:
        for name in names:
            self.ran[name] += seconds / len(names)


@settings(deadline=None, max_examples=10)
@given(st.integers(2, 5), st.integers(1, 2))
def test_of_a_simulated_device_swaps_take_a_tenth_and_everybody_has_a_turn(models: int, room: int) -> None:
    device = Device(models, room)
    device.run(300)
    assert sum(device.ran.values()) >= 0.9 * 300 - 3
    assert min(device.ran.values()) >= 0.8 * max(device.ran.values()) or room >= models


@pytest.mark.parametrize("models", [3, 5])
def test_of_a_simulated_device_nobody_waits_longer_than_a_round(models: int) -> None:
    device = Device(models, 1)
    device.run(300)
    for place in device.places:
        turns = [at for at, name in device.swaps if name == place.name]
        gaps = [after - before for before, after in zip(turns, turns[1:], strict=False)]
        assert max(gaps) <= models * (quantum(device.places[0], device.places[1]) + 0.3 + 0.1)


@settings(deadline=None, max_examples=10)
@given(st.integers(3, 6))
def test_of_a_simulated_device_what_is_kept_stays_and_the_others_take_turns(models: int) -> None:
    device = Device(models, 2)
    first = replace(device.places[0], owner="ann", kept=True)
    device.places = [first, *(replace(place, owner="bob") for place in device.places[1:])]
    device.run(600)
    came = next(at for at, name in device.swaps if name == "m0")
    assert [name for at, name in device.swaps if at > came].count("m0") == 0
    others = [device.ran[place.name] for place in device.places[1:]]
    assert min(others) >= 0.7 * max(others)
