import hashlib
from array import array
from itertools import combinations

from stoker.runtime.engine.prefix import HashChain, block_key, root_key


def test_keys_are_a_sha256_chain() -> None:
    tokens = array("i", range(40))
    chain = HashChain(root_key(b"m", b"float32", b""), tokens)
    first = hashlib.sha256(b"stoker.kv.block" + root_key(b"m", b"float32", b"") + tokens[:16].tobytes()).digest()
    assert chain.key(0) == first
    assert chain.key(1) == block_key(first, tokens[16:32].tobytes())
    assert chain.content(1) == tokens[16:32].tobytes()


def test_keys_follow_tokens_that_are_added_later() -> None:
    tokens = array("i", range(16))
    chain = HashChain(b"root", tokens)
    before = chain.key(0)
    tokens.extend(range(16))
    assert chain.key(1) == block_key(before, tokens[16:32].tobytes())
    assert chain.key(0) == before


def test_no_two_roots_run_together() -> None:
    fields = [(b"m", b"d", b""), (b"md", b"", b""), (b"m", b"", b"d"), (b"m", b"d", b"s"), (b"", b"md", b"")]
    fields += [(b"m", b"ds", b""), (b"msalt", b"d", b""), (b"m", b"dsalt", b"")]
    roots = [root_key(*values) for values in fields]
    assert all(a != b for a, b in combinations(roots, 2))


def test_another_salt_changes_every_key() -> None:
    tokens = array("i", [1] * 64)
    ours, theirs = (HashChain(root_key(b"m", b"d", salt), tokens) for salt in (b"tenant-a", b"tenant-b"))
    assert not {ours.key(i) for i in range(4)} & {theirs.key(i) for i in range(4)}


def test_the_same_block_after_another_one_has_another_key() -> None:
    one, other = HashChain(b"r", array("i", [1] * 16 + [3] * 16)), HashChain(b"r", array("i", [2] * 16 + [3] * 16))
    assert one.content(1) == other.content(1)
    assert one.key(1) != other.key(1)
