"""A ring of equally sized slots in shared memory: filled by the host agent, read by the engine process."""

import contextlib
import ctypes
import mmap
import os

SLOT_BYTES = 16 << 20


class Ring:
    """Anonymous shared memory that another process maps through the inherited `fd`. Who may use which slot is
    agreed between the two sides by message; the ring itself holds no state."""

    def __init__(self, fd: int, slots: int, slot_bytes: int) -> None:
        self.fd = fd
        self.slots = slots
        self.slot_bytes = slot_bytes
        # MAP_POPULATE: first touch costs about a second per GiB, so it is paid here and never inside a load.
        self._memory = mmap.mmap(fd, slots * slot_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._view = memoryview(self._memory)

    @property
    def size(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def address(self) -> int:
        """Where the ring lies in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    @classmethod
    def create(cls, slots: int, slot_bytes: int = SLOT_BYTES) -> "Ring":
        if slots < 1 or slot_bytes < 1:
            raise ValueError(f"a ring needs at least one slot of one byte, not {slots} of {slot_bytes}")
        fd = os.memfd_create("stoker-ring")
        try:
            os.ftruncate(fd, slots * slot_bytes)
            return cls(fd, slots, slot_bytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, slots: int, slot_bytes: int = SLOT_BYTES) -> "Ring":
        """Maps a ring made elsewhere and owns `fd` from here on. Raises ValueError when it is of another size."""
        size = os.fstat(fd).st_size
        if size != slots * slot_bytes:
            raise ValueError(f"the ring has {size} bytes, not {slots} slots of {slot_bytes}")
        return cls(fd, slots, slot_bytes)

    def slot(self, index: int) -> memoryview:
        if not 0 <= index < self.slots:
            raise IndexError(f"slot {index} of {self.slots}")
        return self._view[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def close(self) -> None:
        """The memory itself goes when the last view of a slot does."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self._view.release()
        with contextlib.suppress(BufferError):
            self._memory.close()
