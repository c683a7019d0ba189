"""Which pages of a device's memory belong to whom. All models of the device share one arena of equal pages: a model's
weights lie in a run of pages, its KV cache in any. Weights are put where the plan says, from the low end; KV pages are
taken from the high end. Page 0 is nobody's: it holds the block that every model's padding points to."""

from collections.abc import Iterable
from heapq import nlargest

from stoker.runtime.ledger import NoRoom


class Pages:
    def __init__(self, count: int) -> None:
        self.count = count
        self.weights: dict[str, range] = {}
        self.cache: dict[str, set[int]] = {}
        self._free = set(range(1, count))

    @property
    def free(self) -> int:
        return len(self._free)

    def take_run(self, owner: str, run: range) -> None:
        """For the weights of a model that has none. Raises NoRoom, and changes nothing, if a page is somebody's."""
        if owner in self.weights or not self._free.issuperset(run):
            raise NoRoom(f"pages {run.start} to {run.stop - 1} can't be had by {owner}: some are in use")
        self._free.difference_update(run)
        self.weights[owner] = run

    def take_cache(self, owner: str, count: int) -> list[int]:
        """Up to `count` free pages, the highest."""
        pages = nlargest(count, self._free)
        self._free.difference_update(pages)
        self.cache.setdefault(owner, set()).update(pages)
        return pages

    def give_back(self, owner: str, pages: Iterable[int]) -> None:
        """KV pages. Raises KeyError for one that isn't the owner's."""
        for page in pages:
            self.cache[owner].remove(page)
            self._free.add(page)

    def drop(self, owner: str) -> set[int]:
        """Everything that `owner` had."""
        pages = {*self.weights.pop(owner, ()), *self.cache.pop(owner, ())}
        self._free |= pages
        return pages

    def users(self, run: range) -> dict[str, set[int]]:
        """KV pages in a run, by owner."""
        within = set(run)
        return {owner: pages & within for owner, pages in self.cache.items() if pages & within}
