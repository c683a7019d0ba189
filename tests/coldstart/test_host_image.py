"""Parked bytes come back as they were, stage by stage, and their memory goes when they do."""

import psutil
import pytest
import torch

from stoker.coldstart import host_image
from stoker.coldstart.arrival import Arrival
from stoker.coldstart.host_image import HostImage
from stoker.coldstart.pinned import Registration

SIZE = 1_000_003


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_image, "SLAB_BYTES", 1 << 18)
    monkeypatch.setattr(host_image, "COPY_BYTES", 1 << 16)


def parked(arena: torch.Tensor) -> HostImage:
    image = HostImage(arena.numel())
    image.fill(arena)
    return image


def test_the_bytes_come_back_and_stages_are_issued_in_order():
    arena = torch.randint(0, 256, (SIZE,), dtype=torch.uint8)
    image = parked(arena)
    ends = [0, 5, 70_000, 70_000, SIZE]
    arrival = Arrival(len(ends))
    back, moved, seen = torch.zeros_like(arena), [], []
    issued = arrival.issued
    arrival.issued = lambda stage, event: (seen.append((stage, sum(moved))), issued(stage, event))[0]  # type: ignore[method-assign]
    image.copy_to(back, ends, arrival, moved.append)
    assert back.equal(arena) and sum(moved) == SIZE
    assert [stage for stage, _ in seen] == list(range(len(ends)))
    assert all(before + (1 << 16) >= ends[stage] for stage, before in seen)
    for stage in range(len(ends)):
        arrival.wait(stage)
    image.close()


def test_an_image_is_a_copy_and_can_be_used_again():
    arena = torch.arange(SIZE, dtype=torch.int64).to(torch.uint8)
    image, wanted = parked(arena), arena.clone()
    for _ in range(2):
        arena.zero_()
        image.copy_to(arena, [SIZE], Arrival(1))
        assert arena.equal(wanted)
    image.close()


def test_its_memory_is_given_back():
    process = psutil.Process()
    arena = torch.ones(64 << 20, dtype=torch.uint8)
    before = process.memory_info().rss
    image = parked(arena)
    assert process.memory_info().rss - before > 60 << 20
    image.close()
    assert process.memory_info().rss - before < 8 << 20


def test_an_image_that_cannot_be_filled_leaves_nothing_registered(monkeypatch: pytest.MonkeyPatch):
    registered: set[int] = set()

    class Recorder(Registration):
        def __init__(self, address: int, length: int, *, read_only: bool = False) -> None:
            super().__init__(address, length, read_only=read_only)
            self.at = address
            registered.add(address)

        def release(self) -> None:
            super().release()
            registered.discard(self.at)

    monkeypatch.setattr(host_image, "Registration", Recorder)
    with pytest.raises(RuntimeError, match="must match the size"):
        HostImage(SIZE).fill(torch.zeros(SIZE - 1, dtype=torch.uint8))
    assert not registered
