"""How often blocks of the prompt cache are of use to later requests. Pure."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.runtime.engine.prefix import HashChain

MOST = 1 << 16


class BlockUses:
    """Counts by key. Of more than `most` blocks, all counts are halved and what was of use once is forgotten: what was
    popular long ago gives way (TinyLFU's reset: G. Einziger, R. Friedman and B. Manes, ACM ToS 13(4), 2017)."""

    def __init__(self, most: int = MOST) -> None:
        self.counts: dict[bytes, int] = {}
        self._most = most

    def found(self, chain: "HashChain", blocks: int) -> None:
        """A request began with the first `blocks` of its chain. Those that are public count with every request, also
        the first: their function's deployer says that others will begin with them."""
        for index in range(max(blocks, chain.public_blocks)):
            key = chain.key(index)
            self.counts[key] = self.counts.get(key, 0) + 1
        if len(self.counts) > self._most:
            self.counts = {key: count // 2 for key, count in self.counts.items() if count > 1}

    def remember(self, key: bytes, count: int) -> None:
        """What an earlier replica counted, half of it: what nobody asks for any more is kept no longer."""
        if count > 1:
            self.counts[key] = self.counts.get(key, 0) + count // 2
