import random

import pytest

from stoker.runtime.pool.prompt_choice import Candidate, hottest, is_cheaper, longest, parents


def forest(*chains: tuple[str, list[int]]) -> dict[bytes, Candidate]:
    """Of each chain its name and how often its blocks were of use."""
    made: dict[bytes, Candidate] = {}
    for name, uses in chains:
        for index, count in enumerate(uses):
            key, parent = f"{name}{index}".encode(), f"{name}{index - 1}".encode() if index else b""
            made[key] = Candidate(key, parent, b"", count, place=len(made))
    return made


def names(chosen: list[Candidate]) -> list[str]:
    return [candidate.key.decode() for candidate in chosen]


def test_the_most_used_come_first_and_each_behind_what_it_continues() -> None:
    found = forest(("a", [9, 9, 2]), ("b", [5, 4]), ("c", [1]))
    assert names(hottest(found, 10)) == ["a0", "a1", "b0", "b1", "a2", "c0"]
    assert names(hottest(found, 3)) == ["a0", "a1", "b0"]
    assert hottest(found, 0) == [] == hottest({}, 5)


def test_what_continues_a_block_that_is_gone_is_of_no_use() -> None:
    found = forest(("a", [9, 9, 9]))
    del found[b"a1"]
    assert names(hottest(found, 10)) == ["a0"]


def test_any_choice_is_whole_chains_from_their_heads() -> None:
    rng = random.Random(3)
    for _ in range(100):
        lengths = [sorted((rng.randint(1, 6) for _ in range(rng.randint(1, 8))), reverse=True) for _ in range(6)]
        found = forest(*((str(number) + "-", uses) for number, uses in enumerate(lengths)))
        chosen = hottest(found, rng.randint(0, 20))
        places = parents(chosen)
        for place, (candidate, parent) in enumerate(zip(chosen, places, strict=True)):
            assert (candidate.parent == b"") == (parent == -1) and parent < place
            assert parent == -1 or chosen[parent].key == candidate.parent
        left = [candidate.uses for key, candidate in found.items() if key not in {c.key for c in chosen}]
        assert not left or not chosen or max(left) <= min(candidate.uses for candidate in chosen)


def test_the_longest_chain_counts_its_branches_apart() -> None:
    assert longest([]) == 0
    assert longest([-1, 0, 1, 0, -1]) == 3


@pytest.mark.parametrize(
    ("size", "bytes_s", "tokens", "token_s", "cheaper"),
    [
        (1 << 20, 1e9, 1000, 1e-4, True),
        (1 << 28, 1e9, 1820, 5e-5, False),
        (1 << 28, 1e10, 1820, 5e-5, True),
        (1 << 20, 0, 1000, 1e-4, True),
        (1 << 20, 1e3, 1000, 0, True),
        (0, 1e9, 0, 1e-4, False),
        (0, 0, 0, 0, False),
    ],
    ids=["small", "slow store", "fast store", "store unknown", "prefill unknown", "nothing", "nothing, unknown"],
)
def test_fetched_is_what_takes_longer_to_compute(
    size: int, bytes_s: float, tokens: int, token_s: float, cheaper: bool
) -> None:
    assert is_cheaper(size, bytes_s, tokens, token_s) is cheaper
