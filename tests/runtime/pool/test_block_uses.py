from array import array

from stoker.runtime.engine.prefix import PUBLIC, HashChain, root_key
from stoker.runtime.pool.block_uses import BlockUses

PUBLIC_ROOT = root_key(b"m", b"d", PUBLIC)


def chain(salt: bytes, first: int = 0, public_blocks: int = 0) -> HashChain:
    tokens = array("i", [first + i for i in range(64)])
    return HashChain(root_key(b"m", b"d", salt), tokens, PUBLIC_ROOT, public_blocks)


def test_only_what_a_later_request_found_counts() -> None:
    uses, ours = BlockUses(), chain(b"ann")
    uses.found(ours, 0)
    assert uses.counts == {}
    uses.found(ours, 2)
    uses.found(ours, 1)
    assert uses.counts == {ours.key(0): 2, ours.key(1): 1}


def test_what_is_public_counts_with_the_first_request() -> None:
    uses, ours = BlockUses(), chain(b"ann", public_blocks=2)
    uses.found(ours, 0)
    uses.found(chain(b"bob", public_blocks=2), 3)
    assert [uses.counts.get(ours.key(index)) for index in range(3)] == [2, 2, None]


def test_of_too_many_those_that_were_of_use_once_are_forgotten() -> None:
    uses, popular = BlockUses(most=6), chain(b"ann")
    for _ in range(5):
        uses.found(popular, 2)
    for first in range(100, 103):
        uses.found(chain(b"ann", first), 2)
    assert uses.counts == {popular.key(0): 2, popular.key(1): 2}


def test_an_earlier_replicas_counts_are_worth_half_and_end_some_day() -> None:
    counts = {b"a": 5, b"b": 1}
    for _ in range(3):
        uses = BlockUses()
        for key, count in counts.items():
            uses.remember(key, count)
        counts = uses.counts
        assert b"b" not in counts
    assert counts == {}
