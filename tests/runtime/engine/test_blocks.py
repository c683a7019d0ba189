import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from stoker.runtime.engine.blocks import BlockPool, Entry, OutOfBlocks


def test_blocks_are_numbered_from_one_and_conserved() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    assert sorted(blocks) == [1, 2, 3]
    assert (pool.free, pool.cached, pool.used) == (0, 0, 3)
    with pytest.raises(OutOfBlocks, match="1 blocks wanted, 0 free and 0 cached of 3"):
        pool.allocate(1)
    pool.release(blocks)
    assert (pool.free, pool.cached, pool.used) == (3, 0, 0)


def test_releasing_twice_is_a_bug_that_shows() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def published(pool: BlockPool, *contents: bytes) -> list[int]:
    """A chain of used blocks; a block's key is its content."""
    blocks, parent = pool.allocate(len(contents)), 0
    for block, content in zip(blocks, contents, strict=True):
        parent = pool.publish(block, content, content, parent)
    return blocks


def walk(pool: BlockPool, *contents: bytes) -> list[Entry]:
    hits: list[Entry] = []
    for content in contents:
        entry = pool.find(content, content, hits[-1].serial if hits else 0)
        if entry is None:
            break
        hits.append(entry)
    return hits


def test_published_blocks_are_found_while_used_and_after() -> None:
    pool = BlockPool(4)
    blocks = published(pool, b"a", b"b")
    assert [entry.block for entry in walk(pool, b"a", b"b", b"c")] == blocks
    pool.release(blocks)
    assert (pool.free, pool.cached, pool.used) == (2, 2, 0)
    hits = walk(pool, b"a", b"b")
    assert pool.available(hits) == 2
    pool.take(hits)
    assert (pool.cached, pool.used) == (0, 2)


def test_the_tail_is_evicted_first_and_the_oldest_chain_before_the_newest() -> None:
    pool = BlockPool(4)
    old, new = published(pool, b"a", b"b"), published(pool, b"c", b"d")
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == [old[1]]
    assert pool.allocate(2) == [old[0], new[1]]
    assert len(walk(pool, b"c", b"d")) == 1


def test_equal_content_keeps_the_first_block() -> None:
    pool = BlockPool(2)
    first, second = published(pool, b"a"), published(pool, b"a")
    pool.release(second)
    assert pool.free == 1
    assert [entry.block for entry in walk(pool, b"a")] == first


def test_a_colliding_key_is_no_hit_and_the_newer_content_takes_its_place() -> None:
    pool = BlockPool(2)
    (first,), (second,) = pool.allocate(1), pool.allocate(1)
    pool.publish(first, b"key", b"tokens-1", 0)
    assert pool.find(b"key", b"tokens-2", 0) is None
    pool.release([first])
    pool.publish(second, b"key", b"tokens-2", 0)
    assert pool.find(b"key", b"tokens-1", 0) is None
    assert (pool.free, pool.cached, pool.used) == (1, 0, 1)


def test_a_child_of_an_evicted_parent_is_not_reached_through_a_colliding_one() -> None:
    pool = BlockPool(3)
    parent, child = pool.allocate(2)
    serial = pool.publish(parent, b"key", b"tokens-1", 0)
    pool.publish(child, b"child", b"child", serial)
    pool.release([parent])
    impostor = pool.allocate(2)[1]
    assert impostor == parent
    serial = pool.publish(impostor, b"key", b"tokens-2", 0)
    assert pool.find(b"child", b"child", serial) is None


Chain = tuple[str, ...]


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, publish and go, under keys that collide all the time. `truth` is what each block really holds:
    the whole prefix up to and including it."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.truth: dict[int, Chain] = {}
        self.live: dict[int, tuple[Chain, list[int]]] = {}
        self.published: dict[int, tuple[int, int]] = {}
        self.names = 0

    @staticmethod
    def key(chain: Chain) -> bytes:
        return bytes([sum(map(ord, "".join(chain))) % 3])

    @rule(target=sequences, chain=st.lists(st.sampled_from("abcd"), min_size=1, max_size=4).map(tuple))
    def start(self, chain: Chain) -> int:
        hits = self.hits(chain)
        missing = len(chain) - len(hits)
        self.names += 1
        if self.pool.available(hits) < missing:
            taken = {entry.block for entry in hits}
            assert len(self.used() | taken) + missing > self.pool.total
            self.live[self.names] = ((), [])
            return self.names
        self.pool.take(hits)
        fresh = self.pool.allocate(missing)
        assert not set(fresh) & (self.used() | {entry.block for entry in hits} | {0})
        blocks = [entry.block for entry in hits] + fresh
        self.truth.update({block: chain[: i + 1] for i, block in enumerate(blocks) if block in fresh})
        self.live[self.names] = (chain, blocks)
        self.published[self.names] = (len(hits), hits[-1].serial if hits else 0)
        return self.names

    def hits(self, chain: Chain) -> list[Entry]:
        hits: list[Entry] = []
        for i, content in enumerate(chain):
            parent = hits[-1].serial if hits else 0
            entry = self.pool.find(self.key(chain[: i + 1]), content.encode(), parent)
            if entry is None:
                break
            assert self.truth[entry.block] == chain[: i + 1], "a hit that holds something else"
            hits.append(entry)
        return hits

    @rule(name=sequences)
    def publish(self, name: int) -> None:
        chain, blocks = self.live[name]
        done, parent = self.published.get(name, (0, 0))
        if done < len(chain):
            serial = self.pool.publish(blocks[done], self.key(chain[: done + 1]), chain[done].encode(), parent)
            self.published[name] = (done + 1, serial)
            assert self.pool.find(self.key(chain[: done + 1]), chain[done].encode(), parent)

    @rule(name=consumes(sequences))
    def finish(self, name: int) -> None:
        _, blocks = self.live.pop(name)
        self.pool.release(blocks)

    def used(self) -> set[int]:
        return {block for _, blocks in self.live.values() for block in blocks}

    @invariant()
    def every_block_is_somewhere(self) -> None:
        assert self.pool.free + self.pool.cached + self.pool.used == self.pool.total
        assert self.pool.used == len(self.used())
        assert self.pool.available() == self.pool.total - self.pool.used


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
