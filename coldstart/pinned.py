"""Host memory registered with CUDA where it lies, so that a GPU copies from it at full speed and asynchronously.

Torch's own pinned allocator rounds sizes up to powers of two and can't take memory that exists already: a ring, a file.
"""

import ctypes
import logging
import mmap
from typing import Any

import torch

from stoker.coldstart.mapped_file import libc

READ_ONLY = 8
POPULATE_WRITE = 23

log = logging.getLogger(__name__)


class Registration:
    """`length` bytes from page-aligned `address` on, which must stay mapped until `release`. Without a GPU, and where
    the driver refuses (copies are then slower and hold up their thread), `active` is False."""

    def __init__(self, address: int, length: int, *, read_only: bool = False) -> None:
        self._address = address
        self.active = False
        if length and torch.cuda.is_initialized():
            code = int(cudart().cudaHostRegister(address, length, READ_ONLY if read_only else 0))
            self.active = code == 0
            if code:
                log.warning("%d bytes of host memory can't be registered (CUDA error %d): slower copies", length, code)

    def release(self) -> None:
        """No copy from the memory may be under way."""
        if self.active:
            self.active = False
            cudart().cudaHostUnregister(self._address)


class PinnedMemory:
    """`size` bytes of its own, touched and, with a GPU, `pinned`. Raises OSError when the host has no room for them."""

    def __init__(self, size: int) -> None:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(memory)
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        touch(address, size)
        self._registration = Registration(address, size)

    @property
    def pinned(self) -> bool:
        return self._registration.active

    def close(self) -> None:
        """No copy may be under way. The memory goes with the last view of it."""
        self._registration.release()


def touch(address: int, length: int) -> None:
    """First touch without the interpreter's lock; where the kernel can't (before Linux 5.14), the first use does it."""
    libc.madvise(ctypes.c_void_p(address), length, POPULATE_WRITE)


def cudart() -> Any:
    return torch.cuda.cudart()
