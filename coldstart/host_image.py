"""A parked model: the bytes of its device arena in pinned host memory, from where they come back in large copies.

The memory is mapped and registered piece by piece: torch's pinned allocator would round up to a power of two, and never
gives memory back.
"""

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from stoker.coldstart.arrival import Arrival
from stoker.coldstart.mapped_file import libc
from stoker.coldstart.pinned import Registration
from stoker.coldstart.upload import copy_stream, mark, on_copy_stream

SLAB_BYTES = 1 << 30
COPY_BYTES = 64 << 20
POPULATE_WRITE = 23
THREADS = 8


class HostImage:
    """Immutable once `fill` has returned. Raises MemoryError when the host has no room for `size` bytes."""

    def __init__(self, size: int) -> None:
        self.size = size
        try:
            self._memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"no {size} bytes of host memory for a parked model: {error}") from error
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8, count=size)
        self._pins: list[Registration] = []

    def fill(self, arena: torch.Tensor) -> None:
        """Copies a whole arena (uint8) of this size and waits for it; closes the image when it raises."""
        try:
            self._fill(arena)
        except BaseException:
            # Memory that goes while it is registered leaves its addresses taken on the device.
            if arena.is_cuda:
                copy_stream().synchronize()
            self.close()
            raise

    def _fill(self, arena: torch.Tensor) -> None:
        slabs = [(start, min(SLAB_BYTES, self.size - start)) for start in range(0, self.size, SLAB_BYTES)]
        with ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0)))) as pool:
            for (start, length), _ in zip(slabs, pool.map(lambda slab: self._populate(*slab), slabs), strict=True):
                self._pins.append(Registration(self._bytes.data_ptr() + start, length))
                with on_copy_stream(arena.device):
                    self._bytes[start : start + length].copy_(arena[start : start + length], non_blocking=True)
        if arena.is_cuda:
            copy_stream().synchronize()

    def copy_to(
        self,
        arena: torch.Tensor,
        ends: Sequence[int],
        arrival: Arrival,
        moved: Callable[[int], None] = lambda size: None,
    ) -> None:
        """Queues the copies into `arena`; stage i of `arrival` ends at byte `ends[i]` (not falling). `moved` is told of
        every copy's bytes."""
        stage = 0
        for start in range(0, self.size, COPY_BYTES):
            stop = min(start + COPY_BYTES, self.size)
            with on_copy_stream(arena.device):
                arena[start:stop].copy_(self._bytes[start:stop], non_blocking=True)
            while stage < len(ends) and ends[stage] <= stop:
                arrival.issued(stage, mark(arena.device))
                stage += 1
            moved(stop - start)

    def close(self) -> None:
        """No copy may be under way."""
        for pin in self._pins:
            pin.release()
        self._pins = []
        del self._bytes
        self._memory.close()

    def _populate(self, start: int, length: int) -> None:
        """First touch in parallel and without the GIL; where the kernel can't (before Linux 5.14), the copy does it."""
        libc.madvise(ctypes.c_void_p(self._bytes.data_ptr() + start), length, POPULATE_WRITE)
