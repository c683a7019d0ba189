"""Paged KV blocks and the prefix cache over them. Pure bookkeeping: no tensor is touched here.

Every block is free, used (referenced by a sequence) or cached (unreferenced, but its content may be asked for again).
The null block belongs to nobody and is not counted.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NULL_BLOCK = 0


class OutOfBlocks(Exception):
    """More blocks were asked for than are free or cached."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A block whose content is known. `parent` is the serial number of the entry before it (0: first of a chain), so
    an entry is reached only through the very blocks it was computed after, whatever the keys collide with."""

    block: int
    key: bytes
    parent: int
    serial: int
    tokens: bytes


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        """`num_blocks` usable blocks, numbered from NULL_BLOCK + 1 = 1. More may come, and any may go."""
        self.total = 0
        self._free: list[int] = []
        self._references: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.entries: dict[bytes, Entry] = {}
        self._keys: dict[int, bytes] = {}
        self._serial = 0
        self.add(range(1, num_blocks + 1))

    def add(self, blocks: Sequence[int]) -> None:
        """Usable blocks that the pool didn't have."""
        self._free.extend(reversed(blocks))
        self._references.update(dict.fromkeys(blocks, 0))
        self.total += len(blocks)

    def is_unused(self, blocks: Iterable[int]) -> bool:
        """Nobody refers to those of `blocks` that are the pool's: they may be removed."""
        return not any(self._references.get(block) for block in blocks)

    def remove(self, blocks: Iterable[int]) -> None:
        """Unused ones; their contents can't be found any more. Those that aren't the pool's are passed by."""
        gone = {block for block in blocks if self._references.pop(block, None) is not None}
        for block in gone & self._cached.keys():
            self._forget(block)
        self._free = [block for block in self._free if block not in gone]
        self.total -= len(gone)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def used(self) -> int:
        return self.total - self.free - self.cached

    def find(self, key: bytes, tokens: bytes, parent: int) -> Entry | None:
        """The cached or used block with this content after entry `parent`; the stored tokens are compared."""
        entry = self.entries.get(key)
        return entry if entry and entry.tokens == tokens and entry.parent == parent else None

    def available(self, hits: Sequence[Entry] = ()) -> int:
        """Blocks that `allocate` could hand out once `hits` are taken."""
        return self.free + self.cached - sum(entry.block in self._cached for entry in hits)

    def take(self, hits: Iterable[Entry]) -> None:
        for entry in hits:
            self._cached.pop(entry.block, None)
            self._references[entry.block] += 1

    def allocate(self, count: int) -> list[int]:
        """Blocks of unknown content, the longest unused cached ones last. Raises OutOfBlocks and changes nothing."""
        if count > self.available():
            raise OutOfBlocks(f"{count} blocks wanted, {self.free} free and {self.cached} cached of {self.total}")
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Gives up one reference to each block of a sequence. The tail goes first, so that it is evicted first."""
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} was released twice"
            if self._references[block] == 0:
                self._retire(block)

    def hold(self, block: int) -> None:
        """One more reference to a used block, to be given up with `release`."""
        assert self._references[block] > 0, f"block {block} is nobody's"
        self._references[block] += 1

    def publish(self, block: int, key: bytes, tokens: bytes, parent: int) -> int:
        """Makes a used block's content findable; returns the serial number that its successor names as parent.

        Content that is already there is left alone (this block stays private). Another entry under the same key is
        a collision, or a leftover whose parent was evicted: the new one takes its place.
        """
        if entry := self.find(key, tokens, parent):
            return entry.serial
        if stale := self.entries.get(key):
            self._forget(stale.block)
        self._serial += 1
        self.entries[key] = Entry(block, key, parent, self._serial, tokens)
        self._keys[block] = key
        return self._serial

    def _retire(self, block: int) -> None:
        if block in self._keys:
            self._cached[block] = None
        else:
            self._free.append(block)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self.entries[self._keys.pop(block)]
        return block

    def _forget(self, block: int) -> None:
        del self.entries[self._keys.pop(block)]
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)
