"""What only a folder can suffer: processes killed while writing, files cut or swapped while read."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker.coldstart.failures import FetchCancelled, StoreUnavailable
from stoker.coldstart.file_store import FileStore
from stoker.coldstart.store import ReadWatch

WRITER = """
import sys
from pathlib import Path
from stoker.coldstart.file_store import FileStore
store = FileStore(Path(sys.argv[1]))
print("go", flush=True)
for number in range(10**9):
    store.write("object", bytes([number % 256]) * 4_000_000)
"""


def test_a_writer_killed_at_any_moment_leaves_whole_objects(tmp_path: Path):
    store = FileStore(tmp_path)
    for pause in (0.0, 0.013, 0.031, 0.057, 0.09):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        with process:
            assert process.stdout
            process.stdout.readline()
            time.sleep(0.03 + pause)
            process.send_signal(signal.SIGKILL)
        for entry in store.list():
            data = store.read(entry.key)
            assert entry.key == "object" and len(data) == 4_000_000 and data == data[:1] * len(data)


def test_a_failed_write_leaves_the_old_object_and_nothing_else(tmp_path: Path):
    store = FileStore(tmp_path / "store")
    store.write("x", b"old")
    with pytest.raises(StoreUnavailable, match="can't write"):
        store.write("x", tmp_path / "not there")
    assert store.read("x") == b"old"
    assert os.listdir(tmp_path / "store") == ["x"]


def test_a_file_where_a_folder_is_needed_is_named(tmp_path: Path):
    store = FileStore(tmp_path)
    store.write("x", b"1")
    with pytest.raises(StoreUnavailable, match="x/y"):
        store.write("x/y", b"2")


def test_a_folder_is_not_an_object(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreUnavailable, match="folder"):
        FileStore(tmp_path).read("folder")


def test_etag_follows_the_content_version(tmp_path: Path):
    store = FileStore(tmp_path)
    first = store.write("x", b"aaaa")
    os.utime(tmp_path / "x", ns=(0, 12345))
    assert store.stat("x").etag != first.etag


def test_a_stopped_read_raises_cancelled(tmp_path: Path):
    store = FileStore(tmp_path)
    store.write("x", b"1234")
    watch = ReadWatch()
    watch.stop.set()
    with pytest.raises(FetchCancelled):
        store.read_range("x", 0, memoryview(bytearray(4)), watch=watch)
