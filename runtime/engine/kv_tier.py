"""The prompt cache's second tier: KV blocks in pinned host memory, under the keys they have on the device.

Every block that becomes findable on the device is copied here in the background, once; what the device later evicts is
copied back when a prompt asks for it, in the order of the device's work, so that no step waits on the host. `HostTier`
knows what is where, `Copies` moves it.
"""

import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from stoker.coldstart.pinned import Registration

PAGE = 4096


class Kept(NamedTuple):
    """A block in host memory: its tokens, and the key of the block that it continues (empty: the first)."""

    slot: int
    tokens: bytes
    parent: bytes


class HostTier:
    """Of `slots` blocks the longest unused gives way. A slot may be handed out again while copies from or to it are
    under way: copies run in the order in which they were asked for."""

    def __init__(self, slots: int) -> None:
        self.free = list(range(slots))
        self.kept: OrderedDict[bytes, Kept] = OrderedDict()

    def find(self, key: bytes, tokens: bytes, parent: bytes) -> int | None:
        """The slot with this content after block `parent`; stored tokens are compared."""
        kept = self.kept.get(key)
        if kept is None or kept.tokens != tokens or kept.parent != parent:
            return None
        self.kept.move_to_end(key)
        return kept.slot

    def make_room(self, key: bytes, tokens: bytes, parent: bytes) -> int | None:
        """A slot to copy this content to; None when it is here already."""
        if self.find(key, tokens, parent) is not None:
            return None
        if key in self.kept:
            slot = self.kept.pop(key).slot
        else:
            slot = self.free.pop() if self.free else self.kept.popitem(last=False)[1].slot
        self.kept[key] = Kept(slot, tokens, parent)
        return slot


class Copies:
    """Between the device's cache [N, layers, 2, 16, Hkv, D] and `slots` blocks of host memory."""

    def __init__(self, cache: torch.Tensor, slots: int) -> None:
        self._cache = cache
        size = slots * cache[0].nbytes
        memory = np.empty(size + PAGE, np.uint8)
        start = -memory.ctypes.data % PAGE
        self.host = torch.from_numpy(memory[start : start + size]).view(cache.dtype).view(slots, *cache.shape[1:])
        self.stream = torch.cuda.Stream() if cache.is_cuda else None
        if self.stream:
            pin = Registration(self.host.data_ptr(), size // PAGE * PAGE)
            weakref.finalize(self, give_back, self.stream, pin, memory)
        self._under_way: deque[tuple[torch.cuda.Event, list[int]]] = deque()
        self._done: list[int] = []

    def save(self, moves: Sequence[tuple[int, int]]) -> None:
        """(block, slot) pairs. The blocks are written and stay as they are until `saved` names them."""
        blocks = [block for block, _ in moves]
        if self.stream is None:
            for block, slot in moves:
                self.host[slot] = self._cache[block]
            self._done += blocks
            return
        with torch.cuda.stream(self.stream), torch.inference_mode():
            for block, slot in moves:
                self.host[slot].copy_(self._cache[block], non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._under_way.append((event, blocks))

    def restore(self, moves: Sequence[tuple[int, int]]) -> None:
        """(slot, block) pairs. Steps launched from now on find the blocks filled; none under way uses them."""
        if self.stream is None:
            for slot, block in moves:
                self._cache[block] = self.host[slot]
            return
        with torch.cuda.stream(self.stream), torch.inference_mode():
            for slot, block in moves:
                self._cache[block].copy_(self.host[slot], non_blocking=True)
        torch.cuda.current_stream().wait_stream(self.stream)

    def follow(self) -> None:
        """Copies from now on come after all work that is queued on the device."""
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())

    def saved(self, wait: bool = False) -> list[int]:
        """Blocks whose copies have ended since the last call; waits for at least one if there are any."""
        while self._under_way and (wait or self._under_way[0][0].query()):
            event, blocks = self._under_way.popleft()
            event.synchronize()
            self._done += blocks
            wait = False
        done, self._done = self._done, []
        return done


def give_back(stream: torch.cuda.Stream, pin: Registration, _memory: np.ndarray) -> None:
    """The memory outlives every copy from and to it."""
    stream.synchronize()
    pin.release()
