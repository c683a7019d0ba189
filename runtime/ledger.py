"""Who has how many bytes of one memory: a device's, or a host's for parked models. Nothing is asked of a driver."""

from dataclasses import dataclass


class NoRoom(MemoryError):
    """A reservation doesn't fit; the message says by how much."""


@dataclass(slots=True)
class Entry:
    """`committed` of the reserved bytes are in use."""

    reserved: int
    committed: int = 0


class Ledger:
    """Bytes are reserved before they are allocated, committed when they are, and released when they were given back.
    Not thread-safe."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: dict[str, Entry] = {}

    @property
    def reserved(self) -> int:
        return sum(entry.reserved for entry in self._entries.values())

    @property
    def free(self) -> int:
        return self.capacity - self.reserved

    def reserve(self, owner: str, size: int) -> None:
        """On top of what `owner` has. Raises NoRoom, and then changes nothing."""
        if size > self.free:
            raise NoRoom(
                f"{owner} needs {size} bytes, {self.free} of {self.capacity} are free: short of {size - self.free}"
            )
        self._entries.setdefault(owner, Entry(0)).reserved += size

    def take(self, owner: str, size: int) -> None:
        """What `owner` uses from here on whether there is room or not: `free` may fall below zero."""
        entry = self._entries.setdefault(owner, Entry(0))
        entry.reserved += size
        entry.committed += size

    def commit(self, owner: str, size: int) -> None:
        """`size` bytes of the reservation are in use from here on. Raises ValueError beyond it."""
        entry = self._entries.get(owner, Entry(0))
        if entry.committed + size > entry.reserved:
            raise ValueError(f"{owner} would use {entry.committed + size} bytes of {entry.reserved} reserved")
        entry.committed += size

    def release(self, owner: str) -> int:
        """Everything that `owner` has; its bytes. Nothing for one who has none."""
        return self._entries.pop(owner, Entry(0)).reserved

    def table(self) -> dict[str, tuple[int, int]]:
        """Reserved and committed bytes by owner."""
        return {owner: (entry.reserved, entry.committed) for owner, entry in self._entries.items()}
