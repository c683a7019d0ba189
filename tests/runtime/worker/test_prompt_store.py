"""Kept prompts in real stores: what is taken, what is not, and what is there after a kill."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from stoker.coldstart.failures import FetchCancelled, ObjectChanged, ObjectTruncated
from stoker.coldstart.store import ObjectStore, open_store
from stoker.runtime.pool.prompt_file import PromptsUnusable, Row, pack_head
from stoker.runtime.stored_prompts import forget_all, object_key
from stoker.runtime.worker.prompt_store import PART, PromptStore

KEY = b"k" * 32
MADE_FOR = {"function": "chat", "born": "1", "model": "m", "era": 0}
COMPUTED = {"block_bytes": 1000, "block_tokens": 2}
MOST = 4 * PART


@pytest.fixture(params=["file", "s3"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "file":
        return open_store((tmp_path / "store").as_uri())
    request.getfixturevalue("s3_endpoint")
    return open_store(f"s3://models/{tmp_path.name}")


def host(shared: ObjectStore, tmp_path: Path, name: str = "a", key: bytes = KEY, most: int = MOST) -> PromptStore:
    return PromptStore(shared, tmp_path / name, key, most)


def blocks(
    store: PromptStore, count: int = 2, made_for: dict[str, Any] = MADE_FOR, size: int = 1000, worth_s: float = 0.0
) -> Path:
    """A file as an engine writes it."""
    path = store.scratch()
    rows = [Row(bytes([place]) * 32, place - 1, 1, b"12345678") for place in range(count)]
    content = os.urandom(size) * count
    path.write_bytes(pack_head(made_for, {**COMPUTED, "block_bytes": size}, rows, worth_s) + content)
    return path


def fetch(store: PromptStore, made_for: dict[str, Any] = MADE_FOR) -> bytes:
    found, path = store.find("chat"), store.scratch()
    assert found is not None
    store.fetch(found, made_for, path, Event())
    return path.read_bytes()


def test_one_host_keeps_what_another_fetches(shared: ObjectStore, tmp_path: Path) -> None:
    """Of several parts, in their order; and the engine's file is gone."""
    one, two = host(shared, tmp_path), host(shared, tmp_path, "b")
    assert two.find("chat") is None
    path = blocks(one, 3, size=PART - 5, worth_s=1.5)
    written = path.read_bytes()
    assert one.keep("chat", path) == len(written) + 32 and not path.exists()
    found = two.find("chat")
    assert found and (found.size, found.worth_s) == (len(written) + 32, 1.5)
    assert fetch(two)[:-32] == written
    assert two.bytes_s > 0 == one.bytes_s


def test_the_last_writer_wins_and_functions_are_apart(shared: ObjectStore, tmp_path: Path) -> None:
    store = host(shared, tmp_path)
    store.keep("chat", blocks(store))
    store.keep("ann.chat", blocks(store, 1, {**MADE_FOR, "function": "ann.chat"}))
    later = blocks(store, 3)
    written = later.read_bytes()
    store.keep("chat", later)
    assert fetch(store)[:-32] == written
    assert sorted(found.key for found in shared.list("prompt-cache/")) == ["prompt-cache/ann.chat", "prompt-cache/chat"]
    forget_all(shared)
    assert store.find("chat") is None


@pytest.mark.parametrize("place", [0, 30, -40, -1])
def test_a_flipped_bit_is_noticed(tmp_path: Path, place: int) -> None:
    shared = open_store((tmp_path / "store").as_uri())
    store = host(shared, tmp_path)
    store.keep("chat", blocks(store))
    data = bytearray(shared.read(object_key("chat")))
    data[place] ^= 1
    shared.write(object_key("chat"), bytes(data))
    with pytest.raises(PromptsUnusable, match="damaged"):
        fetch(store)


@pytest.mark.parametrize("length", [0, 1, 31, 32, 40, -1, -32, -1000])
def test_one_that_was_cut_short_is_noticed(tmp_path: Path, length: int) -> None:
    shared = open_store((tmp_path / "store").as_uri())
    store = host(shared, tmp_path)
    store.keep("chat", blocks(store))
    shared.write(object_key("chat"), shared.read(object_key("chat"))[:length])
    with pytest.raises((PromptsUnusable, ObjectTruncated), match="cut short|ends at"):
        fetch(store)


def test_another_deployments_is_not_taken(tmp_path: Path) -> None:
    shared = open_store((tmp_path / "store").as_uri())
    theirs = host(shared, tmp_path, "b", b"other" * 8)
    theirs.keep("chat", blocks(theirs))
    with pytest.raises(PromptsUnusable, match="another deployment's"):
        fetch(host(shared, tmp_path))


@pytest.mark.parametrize(("name", "value"), [("born", "2"), ("model", "other"), ("era", 1), ("function", "ann.chat")])
def test_what_was_made_for_something_else_is_not_taken(tmp_path: Path, name: str, value: Any) -> None:
    """Another function of that name, another revision or other options, and an era in which a tenant was there that is
    gone; and one function's object under the name of another."""
    store = host(open_store((tmp_path / "store").as_uri()), tmp_path)
    store.keep("chat", blocks(store, made_for={**MADE_FOR, name: value}))
    with pytest.raises(PromptsUnusable, match=f"its {name} is {value!r}"):
        fetch(store)


def test_one_that_is_far_too_big_is_not_fetched(tmp_path: Path) -> None:
    shared = open_store((tmp_path / "store").as_uri())
    store = host(shared, tmp_path)
    store.keep("chat", blocks(store, 9))
    small = host(shared, tmp_path, "b", most=1000)
    with pytest.raises(PromptsUnusable, match="where 1000 bytes"):
        fetch(small)
    assert list(small.folder.iterdir()) == []


def test_one_that_changes_meanwhile_is_not_taken(shared: ObjectStore, tmp_path: Path) -> None:
    store = host(shared, tmp_path)
    store.keep("chat", blocks(store))
    found, path = store.find("chat"), store.scratch()
    assert found
    store.keep("chat", blocks(store, 3))
    with pytest.raises((ObjectChanged, ObjectTruncated)):
        store.fetch(found, MADE_FOR, path, Event())


def test_a_fetch_can_be_stopped(tmp_path: Path) -> None:
    store = host(open_store((tmp_path / "store").as_uri()), tmp_path)
    store.keep("chat", blocks(store))
    found, stop = store.find("chat"), Event()
    assert found
    stop.set()
    with pytest.raises(FetchCancelled):
        store.fetch(found, MADE_FOR, store.scratch(), stop)


def test_how_fast_the_store_is_is_learnt_from_what_is_big_enough(tmp_path: Path) -> None:
    store = host(open_store((tmp_path / "store").as_uri()), tmp_path)
    store.learn(1000, 5.0)
    assert store.bytes_s == 0
    store.learn(1 << 30, 1.0)
    assert store.bytes_s == 1 << 30
    store.learn(1 << 20, 1.0)
    assert store.bytes_s == pytest.approx(0.7 * (1 << 30) + 0.3 * (1 << 20))


def test_what_an_agent_left_behind_that_died_is_deleted(tmp_path: Path) -> None:
    shared = open_store((tmp_path / "store").as_uri())
    left = blocks(host(shared, tmp_path))
    assert left.exists()
    host(shared, tmp_path).scratch()
    assert not left.exists()


WRITER = """
import sys
from pathlib import Path
from stoker.coldstart.store import open_store
from tests.runtime.worker.test_prompt_store import blocks, host
store = host(open_store(sys.argv[1]), Path(sys.argv[2]), "writer")
print("ready", flush=True)
while True:
    store.keep("chat", blocks(store, 2, size=1 << 20))
"""


def test_a_writer_that_is_killed_leaves_a_whole_object(tmp_path: Path) -> None:
    """At eight moments from its start on, most of them within some write."""
    url = (tmp_path / "store").as_uri()
    reader, kept = host(open_store(url), tmp_path, "reader"), 0
    for moment in range(8):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, url, str(tmp_path)], stdout=subprocess.PIPE)
        assert writer.stdout and writer.stdout.readline()
        time.sleep(0.04 * moment)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        if reader.find("chat"):
            kept += 1
            assert len(fetch(reader)) > 2 << 20
    assert kept >= 4
