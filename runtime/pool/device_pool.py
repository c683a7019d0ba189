"""A device's memory as its models share it: who is there, what moves when another one comes, who gets more KV blocks.

A model that is there has its weights, and KV pages for one sequence of its longest length: so it can always go on. All
further pages go to whom needs them, and come back when nobody refers to their blocks. The device is never asked what is
free: what was reserved is known."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import NamedTuple, Protocol

import torch

from stoker.runtime.ledger import Ledger
from stoker.runtime.pool.arena import Arena
from stoker.runtime.pool.pages import Pages
from stoker.runtime.pool.turns import HORIZON_S, Place, Swap, decide

SWAP_BYTES_S = {"cuda": 25e9, "cpu": 1e9}
"""How fast weights come to a device, until it was measured."""


class Cache(Protocol):
    """A model's KV blocks, by number."""

    total: int

    @property
    def free(self) -> int: ...
    def available(self) -> int: ...
    def is_unused(self, blocks: Iterable[int]) -> bool: ...
    def remove(self, blocks: Iterable[int]) -> None: ...


@dataclass(slots=True, eq=False)
class Member:
    """One model; adapters count as weights. `least` blocks of `block_bytes` are its own as long as it is there, `most`
    are of use to it. `cache` and `add_blocks` are its engine's. It is to be `kept` there for its owner."""

    name: str
    weights_bytes: int
    block_bytes: int = 0
    least: int = 0
    most: int = 0
    graphs_bytes: int = 0
    owner: str = ""
    kept: bool = False
    cache: Cache | None = None
    home: int | None = None
    since: float = field(default_factory=time.monotonic)
    used_at: float = field(default_factory=time.monotonic)
    requests_s: float = 0.0
    asked_at: float = 0.0


class Demand(NamedTuple):
    """How many requests a model has, how needy the neediest tenant among them is, whether the model may leave, and
    how long it takes to compute again what it loses then."""

    queued: int
    level: float
    movable: bool
    redo_s: float


class DevicePool:
    """Not thread-safe. `owners` of pages are names of models."""

    def __init__(self, device: str, size: int, graphs: int) -> None:
        """Allocates `size` bytes, less what isn't a whole page. `graphs` more bytes are there for CUDA graphs."""
        self.arena = Arena(device, size)
        self.members: dict[str, Member] = {}
        self.pages = Pages(self.arena.pages)
        self.ledger = Ledger((self.arena.pages - 1) * self.arena.page_bytes)
        self._graphs = Ledger(graphs)
        self.swap_bytes_s = SWAP_BYTES_S[device]
        self.swaps = Counter[str]()

    def join(self, member: Member) -> None:
        """Raises MemoryError for a model that has no room even when it is alone."""
        needed, room = self._pages(member) * self.arena.page_bytes, self.ledger.capacity
        if needed > room:
            raise MemoryError(
                f"{member.weights_bytes} bytes of weights and {member.least} KV blocks of {member.block_bytes} bytes "
                f"need {needed} bytes of device memory, {room} are there: short of {needed - room}. "
                "Give the device more memory, or set max_model_len to less"
            )
        self.members[member.name] = member

    def asked(self, name: str, alone: bool) -> None:
        """A request for a model came, `alone` if there was none before. The rate is an average over the horizon."""
        member, now = self.members[name], time.monotonic()
        gone = now - member.asked_at if member.asked_at else HORIZON_S
        member.requests_s = member.requests_s * exp(-gone / HORIZON_S) + 1 / HORIZON_S
        member.asked_at = now
        if alone and not self.is_there(name):
            member.since = now

    def is_there(self, name: str) -> bool:
        return name in self.pages.weights

    def plan(self, demands: Mapping[str, Demand]) -> Swap | None:
        """The next swap, given what is wanted of every model."""
        places = [self._place(member, demands[name]) for name, member in self.members.items()]
        return decide(places, self.pages.count, time.monotonic())

    def enter(self, name: str, start: int) -> torch.Tensor:
        """Room for a model's weights from page `start` on. Whoever had it has left; KV pages of others move away, so
        their engines must have nothing running in these (see `crossed`). Raises NoRoom, and changes nothing then."""
        member = self.members[name]
        run = range(start, start + self.arena.pages_for(member.weights_bytes))
        self.ledger.reserve(name, self._pages(member) * self.arena.page_bytes)
        try:
            for owner, pages in self.pages.users(run).items():
                self._take_back(self.members[owner], pages)
            self.pages.take_run(name, run)
        except BaseException:
            self.ledger.release(name)
            raise
        member.home, member.since = start, time.monotonic()
        return self.arena.run(run, member.weights_bytes)

    def crossed(self, name: str, start: int) -> list[str]:
        """Models with blocks in use where this one's weights would come to lie."""
        run = range(start, start + self.arena.pages_for(self.members[name].weights_bytes))
        return [owner for owner, pages in self.pages.users(run).items() if not self._is_unused(owner, pages)]

    def settle(self, name: str, took_s: float) -> None:
        """The weights are there; bringing them back took so long (0: that isn't known)."""
        self.ledger.commit(name, len(self.pages.weights[name]) * self.arena.page_bytes)
        if took_s:
            self.swaps.update(count=1, bytes=self.members[name].weights_bytes, us=int(took_s * 1e6))
            self.swap_bytes_s += 0.3 * (self.members[name].weights_bytes / took_s - self.swap_bytes_s)

    def graph_bytes(self, name: str) -> int:
        """What a model may use for CUDA graphs: as much as it wants, but no more than a fourth of what is left."""
        size = min(self.members[name].graphs_bytes, self._graphs.free // 4)
        self._graphs.reserve(name, size)
        return size

    def leave(self, name: str) -> None:
        """Its engine refers to no blocks any more. Nothing is copied."""
        member = self.members[name]
        self._take_back(member, set(self.pages.cache.get(name, ())))
        self.arena.give_back(self.pages.drop(name))
        self.ledger.release(name)
        member.since = time.monotonic()

    def quit(self, name: str) -> None:
        if self.members.pop(name, None):
            self.arena.give_back(self.pages.drop(name))
            self.ledger.release(name)
            self._graphs.release(name)

    def more_blocks(self, name: str, wanted: int) -> list[int]:
        """Blocks for a model whose next steps want so many, beside those that it has to have: from free pages as long
        as there are some, else from pages that others don't need, if it can't do with what it has."""
        member = self.members[name]
        cache = member.cache
        member.used_at = time.monotonic()
        if cache is None:
            return []
        missing = min(max(wanted - cache.free, member.least - cache.total), member.most - cache.total)
        if missing <= 0:
            return []
        short = max(min(wanted - cache.available(), member.most - cache.total), member.least - cache.total)
        if short > 0:
            self._reclaim(name, self.arena.pages_of_cache(short, member.block_bytes) - self._left_for(name))
        count = self.arena.pages_of_cache(missing, member.block_bytes)
        pages = self.pages.take_cache(name, max(0, min(count, self._left_for(name))))
        self.arena.clear(pages)
        return [block for page in sorted(pages) for block in self.arena.blocks(page, member.block_bytes)]

    def hogs(self, name: str) -> list[str]:
        """While a model has less KV than it must have: who has more than that, and so has to give."""
        member = self.members[name]
        if member.cache is None or member.cache.total >= member.least:
            return []
        extra = {other: len(pages) - self._floor(self.members[other]) for other, pages in self.pages.cache.items()}
        return [other for other, pages in extra.items() if pages > 0 and other != name]

    def is_crowded(self) -> bool:
        """Not all models fit at once."""
        needed = sum(self._pages(member) for member in self.members.values())
        return needed * self.arena.page_bytes > self.ledger.capacity

    def table(self) -> dict[str, tuple[int, int, int]]:
        """Bytes that models have reserved and committed, and bytes of KV pages."""
        cache = {name: len(pages) * self.arena.page_bytes for name, pages in self.pages.cache.items()}
        return {name: (*entry, cache.get(name, 0)) for name, entry in self.ledger.table().items()}

    def _pages(self, member: Member) -> int:
        return self.arena.pages_for(member.weights_bytes) + self._floor(member)

    def _floor(self, member: Member) -> int:
        return self.arena.pages_of_cache(member.least, member.block_bytes) if member.least else 0

    def _place(self, member: Member, demand: Demand) -> Place:
        run = self.pages.weights.get(member.name)
        return Place(
            name=member.name,
            weights=self.arena.pages_for(member.weights_bytes),
            floor=self._floor(member),
            start=run.start if run else None,
            home=member.home,
            queued=demand.queued,
            since=member.since,
            movable=demand.movable,
            swap_s=member.weights_bytes / self.swap_bytes_s,
            redo_s=demand.redo_s,
            level=demand.level,
            requests_s=member.requests_s * exp((member.asked_at - time.monotonic()) / HORIZON_S),
            owner=member.owner,
            kept=member.kept,
        )

    def _left_for(self, name: str) -> int:
        """Free pages less those that other models there are still to get as their floors; below zero when these have to
        come from somebody first."""
        owed = sum(
            max(0, self._floor(self.members[owner]) - len(self.pages.cache.get(owner, ())))
            for owner in self.pages.weights
            if owner != name
        )
        return self.pages.free - owed

    def _reclaim(self, name: str, count: int) -> None:
        """Frees up to `count` pages that others have beyond what they must have and don't refer to; from the longest
        unused model first."""
        for other in sorted(self.members.values(), key=lambda member: member.used_at):
            pages = self.pages.cache.get(other.name, set())
            extra = len(pages) - self._floor(other)
            if count <= 0:
                return
            if other.name == name or extra <= 0:
                continue
            unused = [page for page in sorted(pages) if self._is_unused(other.name, [page])][: min(extra, count)]
            self._take_back(other, set(unused))
            count -= len(unused)

    def _is_unused(self, owner: str, pages: Iterable[int]) -> bool:
        cache = self.members[owner].cache
        return cache is None or all(cache.is_unused(self._blocks(owner, page)) for page in pages)

    def _take_back(self, member: Member, pages: set[int]) -> None:
        if member.cache is not None:
            member.cache.remove([block for page in pages for block in self._blocks(member.name, page)])
        self.pages.give_back(member.name, pages)
        self.arena.give_back(pages)

    def _blocks(self, owner: str, page: int) -> Sequence[int]:
        return self.arena.blocks(page, self.members[owner].block_bytes)
