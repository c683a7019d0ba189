"""Pages of an arena: every one is free, or one model's. A random program against a plain record of what belongs to
whom."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stoker.runtime.ledger import NoRoom
from stoker.runtime.pool.pages import Pages

COUNT = 24
MODELS = ("a", "b", "c")


class Arena(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages(COUNT)
        self.owner: dict[int, str] = {}

    @rule(model=st.sampled_from(MODELS), start=st.integers(1, COUNT - 1), size=st.integers(1, 8))
    def take_run(self, model: str, start: int, size: int) -> None:
        run = range(start, min(start + size, COUNT))
        before = dict(self.owner)
        if model in self.pages.weights or any(page in self.owner for page in run):
            with pytest.raises(NoRoom):
                self.pages.take_run(model, run)
            assert self.owner == before
        else:
            self.pages.take_run(model, run)
            self.owner.update(dict.fromkeys(run, model))

    @rule(model=st.sampled_from(MODELS), count=st.integers(0, 10))
    def take_cache(self, model: str, count: int) -> None:
        free = self.pages.free
        pages = self.pages.take_cache(model, count)
        assert len(pages) == min(count, free) and not any(page in self.owner for page in pages)
        self.owner.update(dict.fromkeys(pages, model))

    @precondition(lambda self: any(self.pages.cache.values()))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(sorted(name for name, pages in self.pages.cache.items() if pages)))
        page = data.draw(st.sampled_from(sorted(self.pages.cache[model])))
        self.pages.give_back(model, [page])
        del self.owner[page]

    @rule(model=st.sampled_from(MODELS))
    def drop(self, model: str) -> None:
        mine = {page for page, owner in self.owner.items() if owner == model}
        assert self.pages.drop(model) == mine
        self.owner = {page: owner for page, owner in self.owner.items() if owner != model}

    @invariant()
    def every_page_is_free_or_somebodys(self) -> None:
        assert self.pages.free == COUNT - 1 - len(self.owner)
        for owner, pages in self.pages.users(range(COUNT)).items():
            assert all(self.owner[page] == owner for page in pages)
        for owner, run in self.pages.weights.items():
            assert all(self.owner[page] == owner for page in run)


TestArena = Arena.TestCase
