"""A full replica has places left for tenants with less than an equal part, and for nobody else."""

from hypothesis import given
from hypothesis import strategies as st

from stoker.runtime.worker.seats import Seats, seats

HELD = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 20))


def listed(held: dict[str, int]) -> list[str]:
    return [tenant for tenant, count in held.items() for _ in range(count)]


def test_while_there_is_room_it_is_anyones() -> None:
    assert seats(16, listed({"flood": 10})) == Seats(6)


def test_beside_a_flood_there_is_a_place_for_another() -> None:
    assert seats(16, listed({"flood": 16})) == Seats(4, frozenset({"flood"}))
    assert seats(16, listed({"flood": 16, "calm": 1})) == Seats(3, frozenset({"flood"}))
    assert seats(1, ["flood"]) == Seats(1, frozenset({"flood"}))


def test_a_third_finds_a_place_beside_two_that_share() -> None:
    assert seats(16, listed({"one": 8, "other": 8})) == Seats(4, frozenset({"one", "other"}))


@given(st.integers(1, 64), HELD)
def test_places_are_bounded(most: int, held: dict[str, int]) -> None:
    found = seats(most, listed(held))
    count = sum(held.values())
    assert found.free == 0 or count + found.free <= most + -(-most // 4)
    assert bool(found.but) == (count >= most)


@given(st.integers(1, 32), st.integers(1, 5))
def test_places_that_come_free_go_over_until_the_parts_are_equal(most: int, tenants: int) -> None:
    """One tenant has all places; its jobs end one after the other while all tenants always have more waiting."""
    held = {str(i): most if i == 0 else 0 for i in range(tenants)}
    for _ in range(200):
        found = seats(most, listed(held))
        able = [tenant for tenant in held if tenant not in found.but]
        for _ in range(found.free if able else 0):
            held[min(able, key=lambda tenant: held[tenant])] += 1
            found = seats(most, listed(held))
            able = [tenant for tenant in held if tenant not in found.but and found.free]
            if not able:
                break
        held[max(held, key=lambda tenant: held[tenant])] -= 1
    assert min(held.values()) >= most // (tenants + 1) - 1
