"""Memory of a device that models share: a random program of models that come, go and want blocks. Whatever happens,
nothing has two owners, what was reserved fits, and who is there gets what it must have."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stoker.runtime.engine.blocks import BlockPool
from stoker.runtime.ledger import NoRoom
from stoker.runtime.pool.device_pool import Demand, DevicePool, Member

PAGE = 1 << 16
PAGES = 40
SIZES = {"a": (5 * PAGE, 20_000, 12), "b": (9 * PAGE, 9_000, 20), "c": (3 * PAGE - 100, 30_000, 6), "d": (PAGE, 0, 0)}


class Device(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = DevicePool("cpu", PAGES * PAGE, 0)
        self.used: dict[str, list[int]] = {name: [] for name in SIZES}
        for name, (weights, block, least) in SIZES.items():
            member = Member(name, weights, block, least, 4 * least)
            member.cache = BlockPool(0) if block else None
            self.pool.join(member)

    @rule(wanted=st.sets(st.sampled_from(sorted(SIZES)), min_size=1))
    def swap(self, wanted: set[str]) -> None:
        demands = {name: Demand(int(name in wanted), 0.0, True, 0.0) for name in SIZES}
        plan = self.pool.plan(demands)
        if plan is None:
            return
        for name in plan.victims:
            self.give_up(name)
            self.pool.leave(name)
        for name in self.pool.crossed(plan.model, plan.start):
            self.give_up(name)
        arena = self.pool.enter(plan.model, plan.start)
        assert arena.numel() == SIZES[plan.model][0]
        self.pool.settle(plan.model, 0.1)

    @precondition(lambda self: self.pool.pages.weights)
    @rule(data=st.data())
    def want_blocks(self, data: st.DataObject) -> None:
        """What a step does first; then it takes all that it wanted if there is so much."""
        name = data.draw(st.sampled_from(sorted(self.pool.pages.weights)))
        member, cache = self.pool.members[name], self.pool.members[name].cache
        if cache is None:
            return
        assert isinstance(cache, BlockPool)
        wanted = data.draw(st.integers(0, 2 * member.least))
        self.add(name, wanted)
        for hog in self.pool.hogs(name):
            self.give_up(hog)
            self.add(name, wanted)
        assert cache.total >= member.least, "a sequence of the longest length fits"
        taken = min(wanted, cache.available())
        self.used[name] += cache.allocate(taken)

    def add(self, name: str, wanted: int) -> None:
        cache, most = self.pool.members[name].cache, self.pool.members[name].most
        assert isinstance(cache, BlockPool)
        cache.add(self.pool.more_blocks(name, wanted)[: most - cache.total])

    @rule(name=st.sampled_from(sorted(SIZES)))
    def give_up(self, name: str) -> None:
        cache = self.pool.members[name].cache
        if isinstance(cache, BlockPool):
            cache.release(self.used[name])
        self.used[name] = []

    @invariant()
    def nothing_has_two_owners(self) -> None:
        spans: list[tuple[int, int, str]] = []
        for name, run in self.pool.pages.weights.items():
            spans.append((run.start * PAGE, run.stop * PAGE, name))
        for name, blocks in self.used.items():
            size = SIZES[name][1]
            spans += [(block * size, (block + 1) * size, name) for block in blocks]
        spans.sort()
        for (_, end, first), (start, _, second) in zip(spans, spans[1:], strict=False):
            assert end <= start, f"{first} and {second} have the same bytes"
        assert all(start >= PAGE for start, _, _ in spans)

    @invariant()
    def what_is_reserved_fits(self) -> None:
        assert self.pool.ledger.free >= 0
        assert set(self.pool.ledger.table()) == set(self.pool.pages.weights)


Device.TestCase.settings = settings(deadline=None)
TestDevice = Device.TestCase


def test_a_place_that_is_taken_leaves_no_reservation_behind() -> None:
    pool = DevicePool("cpu", PAGES * PAGE, 0)
    for name in ("a", "b"):
        pool.join(Member(name, 5 * PAGE))
    pool.enter("a", 3)
    before = pool.table(), pool.pages.free
    with pytest.raises(NoRoom):
        pool.enter("b", 6)
    assert (pool.table(), pool.pages.free) == before
    pool.enter("b", 8)


def test_a_model_that_never_fits_is_refused_with_what_it_lacks() -> None:
    pool = DevicePool("cpu", PAGES * PAGE, 0)
    with pytest.raises(MemoryError, match=f"short of {2 * PAGE}"):
        pool.join(Member("wide", (PAGES + 1) * PAGE))
