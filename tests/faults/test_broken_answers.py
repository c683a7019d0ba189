"""User code whose results, errors or meddling get in the way of its own answer: the job ends at once, with what went
wrong, and so do the jobs after it."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from stoker.runtime.client.client import Client
from stoker.runtime.client.errors import StokerError
from stoker.runtime.local import LocalStack

pytestmark = pytest.mark.xdist_group("functions")

# Shorter than a lease and than a job's time limit: nobody may have waited for either.
AT_ONCE_S = 8

APP = """
import os, tempfile, threading, time
from dataclasses import dataclass
from typing import Any

import msgpack
from pydantic import BaseModel, field_validator
import stoker

app = stoker.App("broken")


@dataclass
class Held:
    value: Any


class Order(BaseModel):
    sku: str

    @field_validator("sku")
    @classmethod
    def known(cls, sku):
        return {"a": "A", "lock": "lock"}[sku]


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no")


def leave_no_folder():
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)
    raise ValueError("no folder")


def odd_traceback():
    exec(compile("raise ValueError(1)", "\\ud800.py", "exec"), {})


def speak_for_itself(items):
    # On the channel of the function's process.
    from stoker.runtime.wire import HEADER
    body = msgpack.packb({"t": "results", "items": items})
    for fd in range(3, 200):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                os.write(fd, HEADER.pack(len(body)) + body)
        except OSError:
            pass
    time.sleep(60)


def raised(error):
    raise error


KINDS = {
    "fine": lambda: "fine",
    "surrogate key": lambda: {"\\ud800": 1},
    "huge key": lambda: {2**70: 1},
    "surrogate": lambda: raised(ValueError("\\ud800")),
    "odd traceback": odd_traceback,
    "no folder": leave_no_folder,
    "odd module": lambda: raised(ModuleNotFoundError("x", name=5)),
    "mute": lambda: raised(Mute()),
    "lock": lambda: Held(threading.Lock()),
    "junk array": lambda: msgpack.ExtType(78, b"junk"),
    "too big": lambda: bytearray(1),
    "no output": lambda: (os.close(1), print("unheard"), "said")[2],
    "no files": lambda: (os.closerange(0, 200), "unheard")[1],
    "nonsense": lambda: speak_for_itself(5),
    "exit": lambda: os._exit(9),
}


@app.function(retries=0, concurrency=4)
def several(kind):
    return KINDS[kind]()


@app.function(retries=0)
def alone(kind):
    return KINDS[kind]()


@app.function(retries=0, concurrency=4)
def crashing(kind):
    return KINDS[kind]()


@app.function(retries=0, memory_mb=200)
def narrow(megabytes: int):
    return bytes(megabytes << 20)


@app.function(retries=0, batch=stoker.Batch(max_size=4, max_wait_ms=300))
def batched(orders: list[Order]):
    return [Held(threading.Lock()) if order.sku == "lock" else order.sku for order in orders]
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """With the usual lease of ten seconds, which a test would notice."""
    folder = tmp_path_factory.mktemp("broken")
    with LocalStack(folder / "data") as stack:
        (folder / "broken_app.py").write_text(APP)
        stack.deploy(folder / "broken_app.py")
        yield stack


@pytest.fixture(scope="module")
def client(stack: LocalStack) -> Iterator[Client]:
    with stack.client() as client:
        for name, value in (("several", "fine"), ("alone", "fine"), ("narrow", 1), ("batched", {"sku": "a"})):
            client.invoke(name, value)
        yield client


@pytest.mark.parametrize("name", ["several", "alone"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("surrogate key", "surrogate"),
        ("huge key", "64 bits"),
        ("surrogate", r"ValueError: \?"),
        ("odd traceback", "ValueError: 1"),
        ("no folder", "ValueError: no folder"),
        ("odd module", "ModuleNotFoundError: x"),
        ("mute", "its message raised RuntimeError"),
        ("lock", "lock"),
        ("junk array", "no array"),
        ("too big", "bytearray"),
        ("no files", "exit code 70"),
        ("nonsense", "can't be read"),
        ("exit", "exit code 9"),
    ],
)
def test_the_job_ends_at_once_with_what_went_wrong(client: Client, name: str, kind: str, message: str) -> None:
    started = time.monotonic()
    with pytest.raises(StokerError, match=message):
        client.invoke(name, kind)
    assert client.invoke(name, "fine") == "fine"
    assert time.monotonic() - started < AT_ONCE_S


def test_a_function_that_closes_its_output_still_answers(client: Client) -> None:
    assert client.invoke("several", "no output") == "said"
    assert client.invoke("several", "fine") == "fine"


def test_a_result_that_there_is_no_memory_to_send_fails_at_once(client: Client) -> None:
    started = time.monotonic()
    with pytest.raises(StokerError, match="MemoryError"):
        client.invoke("narrow", 150)
    assert client.invoke("narrow", 1) == bytes(1 << 20)
    assert time.monotonic() - started < AT_ONCE_S


def test_one_odd_input_or_result_fails_alone_in_its_batch(client: Client) -> None:
    started = time.monotonic()
    with ThreadPoolExecutor(4) as threads:
        calls = {sku: threads.submit(client.invoke, "batched", {"sku": sku}) for sku in ("a", "lock", "other")}
    assert calls["a"].result() == "A"
    assert "lock" in str(calls["lock"].exception()) and "KeyError" in str(calls["other"].exception())
    assert time.monotonic() - started < AT_ONCE_S


def test_the_call_after_a_crash_is_not_lost_to_it(client: Client) -> None:
    """No matter when it comes: while the process ends, before that is known, or after."""
    assert client.invoke("crashing", "fine") == "fine"
    for pause_s in (0.0, 0.05, 0.3):
        with pytest.raises(StokerError, match="exit code 9"):
            client.invoke("crashing", "exit")
        time.sleep(pause_s)
        started = time.monotonic()
        assert client.invoke("crashing", "fine") == "fine"
        assert time.monotonic() - started < AT_ONCE_S
