"""A published file mapped into memory, to be copied to a device straight from the page cache."""

import ctypes
import mmap
import os
from pathlib import Path

from stoker.coldstart.failures import ObjectMissing, ObjectTruncated, StoreUnavailable

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MappedFile:
    """The first `size` bytes of a file, shared and read-only: a private mapping can't be registered with CUDA.

    Raises ObjectMissing, ObjectTruncated or StoreUnavailable. A file that is cut short in place afterwards kills the
    process that reads the lost part; published files are replaced, never rewritten.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.name, self.size = path.absolute().as_uri(), size
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ObjectMissing(self.name, None, "there is no such file") from error
        except OSError as error:
            raise StoreUnavailable(self.name, None, f"can't open: {error}") from error
        try:
            found = os.fstat(fd).st_size
            if found != size:
                raise ObjectTruncated(self.name, (0, size), f"the file has {found} bytes")
            self.address = mapped(fd, size, self.name)
        finally:
            os.close(fd)

    def view(self, offset: int, length: int) -> memoryview:
        """Not to be written to, whatever it says, and not to be used after `close`."""
        return memoryview((ctypes.c_uint8 * length).from_address(self.address + offset)).cast("B")

    def close(self) -> None:
        if self.size:
            libc.munmap(self.address, self.size)
            self.size = 0


def mapped(fd: int, size: int, name: str) -> int:
    if not size:
        return 0
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise StoreUnavailable(name, None, f"can't map: {os.strerror(ctypes.get_errno())}")
    return address
