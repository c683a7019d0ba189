"""Host memory registered with CUDA where it lies, so that a GPU copies from it at full speed and asynchronously.

Torch's own pinned allocator rounds sizes up to powers of two and can't take memory that exists already: a ring, a file.
"""

import logging
from typing import Any

import torch

READ_ONLY = 8

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


def cudart() -> Any:
    return torch.cuda.cudart()
