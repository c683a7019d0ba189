"""The ring is one piece of memory in two processes."""

import os
import subprocess
import sys

import pytest

from stoker.coldstart.ring import Ring

READER = """
import sys
from stoker.coldstart.ring import Ring
ring = Ring.attach(int(sys.argv[1]), 3, 4096)
assert bytes(ring.slot(1)[:5]) == b"hello"
ring.slot(2)[:5] = b"world"
ring.close()
"""


def test_another_process_sees_and_writes_the_same_memory():
    ring = Ring.create(3, 4096)
    ring.slot(1)[:5] = b"hello"
    fd = os.dup(ring.fd)
    try:
        subprocess.run([sys.executable, "-c", READER, str(fd)], pass_fds=[fd], check=True)
    finally:
        os.close(fd)
    assert bytes(ring.slot(2)[:5]) == b"world"
    assert bytes(ring.slot(0)) == bytes(4096)
    ring.close()


def test_slots_do_not_overlap_and_are_bounded():
    ring = Ring.create(4, 16)
    for index in range(4):
        ring.slot(index)[:] = bytes([index]) * 16
    assert [bytes(ring.slot(index)) for index in range(4)] == [bytes([index]) * 16 for index in range(4)]
    for index in (-1, 4):
        with pytest.raises(IndexError):
            ring.slot(index)
    ring.close()


def test_close_keeps_views_alive_and_gives_the_descriptor_back():
    ring = Ring.create(1, 4096)
    view, fd = ring.slot(0), ring.fd
    ring.close()
    ring.close()
    view[:2] = b"ok"
    assert bytes(view[:2]) == b"ok"
    with pytest.raises(OSError):
        os.fstat(fd)


def test_wrong_sizes_are_refused():
    ring = Ring.create(2, 4096)
    with pytest.raises(ValueError, match="8192 bytes, not 3 slots"):
        Ring.attach(ring.fd, 3, 4096)
    ring.close()
    with pytest.raises(ValueError):
        Ring.create(0)
