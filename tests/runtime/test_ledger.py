from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.runtime.ledger import Ledger, NoRoom


def test_reserve_commit_release():
    ledger = Ledger(100)
    ledger.reserve("a", 60)
    ledger.commit("a", 50)
    assert (ledger.free, ledger.table()) == (40, {"a": (60, 50)})
    with pytest.raises(NoRoom, match="b needs 41 bytes, 40 of 100 are free: short of 1"):
        ledger.reserve("b", 41)
    ledger.reserve("a", 40)
    assert ledger.free == 0
    assert (ledger.release("a"), ledger.release("a"), ledger.free) == (100, 0, 100)


def test_what_must_be_had_is_taken_though_there_is_no_room():
    ledger = Ledger(100)
    ledger.reserve("a", 60)
    ledger.take("b", 50)
    ledger.take("b", 5)
    assert (ledger.free, ledger.table()["b"]) == (-15, (55, 55))
    with pytest.raises(NoRoom, match="short of 16"):
        ledger.reserve("a", 1)
    assert (ledger.release("b"), ledger.free) == (55, 40)


def test_more_than_was_reserved_cannot_be_committed():
    ledger = Ledger(100)
    ledger.reserve("a", 10)
    with pytest.raises(ValueError, match="11 bytes of 10"):
        ledger.commit("a", 11)
    with pytest.raises(ValueError, match="1 bytes of 0"):
        ledger.commit("b", 1)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["reserve", "commit", "release"]), st.integers(0, 60)))
)
def test_what_is_free_and_what_is_reserved_are_all(steps: list[tuple[str, str, int]]):
    ledger = Ledger(100)
    for owner, step, size in steps:
        with suppress(NoRoom, ValueError):
            ledger.release(owner) if step == "release" else getattr(ledger, step)(owner, size)
        assert ledger.free >= 0 and ledger.free + sum(entry[0] for entry in ledger.table().values()) == 100
        assert all(0 <= committed <= reserved for reserved, committed in ledger.table().values())
