"""One allocation of device memory for all models of a process, in equal pages: weights and KV blocks are views of it.

Every model's KV cache starts at the arena's first byte and numbers its blocks from there on, in its own block size:
which pages a model may use changes from moment to moment, the addresses in its CUDA graphs never do. What is in a page
is zeroed before it becomes KV: no model sees another's bytes, and none reads them as numbers that aren't finite.
"""

import ctypes
import mmap
from collections.abc import Iterable
from math import prod

import torch

from stoker.coldstart.mapped_file import libc

SMALLEST_PAGE, LARGEST_PAGE = 1 << 16, 1 << 26
DONT_NEED = 4
PAGES = 256
"""A small device has so many at least; a large one has more, of the largest size."""


class Arena:
    def __init__(self, device: str, size: int) -> None:
        self.page_bytes = min(max(1 << max(size // PAGES, 1).bit_length() - 1, SMALLEST_PAGE), LARGEST_PAGE)
        self.pages = size // self.page_bytes
        self._written = bytearray((b"\0" if device == "cpu" else b"\1") * self.pages)
        if device == "cpu":
            # Zero pages come from the kernel as they are used, and can be given back to it.
            mapped = mmap.mmap(-1, self.pages * self.page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.memory = torch.frombuffer(mapped, dtype=torch.uint8)
        else:
            self.memory = torch.empty(self.pages * self.page_bytes, dtype=torch.uint8, device=device)

    def pages_for(self, size: int) -> int:
        return -(-size // self.page_bytes)

    def run(self, run: range, size: int) -> torch.Tensor:
        """`size` bytes from the start of a run of pages, whatever they are."""
        self._written[run.start : run.stop] = b"\1" * len(run)
        return self.memory[run.start * self.page_bytes :][:size]

    def cache(self, block: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """All of the arena as blocks of that shape. Raises MemoryError when a page may hold none."""
        size = prod(block) * dtype.itemsize
        if 2 * size > self.page_bytes:
            raise MemoryError(
                f"a KV block of this model has {size} bytes, a page of the device's memory {self.page_bytes}: "
                f"give it {2 * size * PAGES} bytes of device memory or more"
            )
        count = self.memory.numel() // size
        return self.memory[: count * size].view(dtype).view(count, *block)

    def blocks(self, page: int, size: int) -> range:
        """The blocks of `size` bytes that lie in a page with all their bytes."""
        return range(-(-page * self.page_bytes // size), (page + 1) * self.page_bytes // size)

    def pages_of_cache(self, blocks: int, size: int) -> int:
        """As many pages as hold that many blocks, wherever they are."""
        return -(-blocks // (self.page_bytes // size - (1 if self.page_bytes % size else 0)))

    def give_back(self, pages: Iterable[int]) -> None:
        """What is in these pages isn't needed any more. A host's memory is free for others then."""
        for page in pages if not self.memory.is_cuda else ():
            address = self.memory.data_ptr() + page * self.page_bytes
            libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(self.page_bytes), DONT_NEED)
            self._written[page] = 0

    def clear(self, pages: Iterable[int]) -> None:
        for page in pages:
            if self._written[page]:
                self.memory[page * self.page_bytes : (page + 1) * self.page_bytes].zero_()
            self._written[page] = 1
